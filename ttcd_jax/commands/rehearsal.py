"""The rehearsal of a run: what its pod would do first, tried here, and all that is wrong at once.

The parts, each tried even if another one failed, unless it needs that one:

    data         token records: manifests, the digest of the first shard, the first row; text: all
    tokenizer    it reads a text back, and makes the first row of text
    model        it fits the data and an intact run that it starts from; trackers can be started
    evaluations  their rows are made from the validation split
    step         it is laid out and compiled
    memory       it fits the devices
    run_dir      it is that of this run; a tiny checkpoint is saved there, restored and removed
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_jax import storage
from ttcd_jax.commands import plan
from ttcd_jax.data import records, sources
from ttcd_jax.data.pipeline import Batches, RowSource
from ttcd_jax.data.tokenizer import build_tokenizer
from ttcd_jax.errors import CheckpointError, DataError, ResourceError, UserError
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import REHEARSAL, RunDirectory, open_checkpoints
from ttcd_jax.run.start import plan_start
from ttcd_jax.run.trackers import TRACKERS
from ttcd_jax.run.training import check_kept
from ttcd_jax.train.checkpoint import Checkpoints
from ttcd_jax.units import size

TEXT = "The same text, read back: 0123456789."
_NEEDS = {"model": {"tokenizer", "data"}, "evaluations": {"tokenizer", "data"}, "memory": {"step"}}
_FAILURES = (UserError, OSError, jax.errors.JaxRuntimeError)


@dataclasses.dataclass
class Rehearsal:
    """Of a run on the devices of `target`, or on those here. `changes`: the fields that may differ
    from those of the run in `run_dir`."""

    config: RunConfig
    run_dir: RunDirectory
    target: plan.Target | None
    changes: Sequence[str] = ()

    def run(self) -> None:
        """Tries the parts and prints what was tried. Nothing stays but what the caches keep. Raises
        `UserError` naming the parts that failed, with the exit status of the first."""
        failed = dict[str, Exception]()
        parts: dict[str, Callable[[], str]] = {"data": self.data}
        if isinstance(self.config.data, sources.Texts):
            parts["tokenizer"] = self.tokenizer
        parts["model"] = self.model
        if self.config.evaluate_every is not None:
            parts["evaluations"] = self.evaluations
        parts |= {"step": self.step, "memory": self.memory, "run_dir": self.saved}
        for name, part in parts.items():
            begin = time.monotonic()
            if lacking := _NEEDS.get(name, set()) & {*failed}:
                result, text = "not tried", f"after {' and '.join(sorted(lacking))} failed"
            else:
                try:
                    result, text = "ok", part()
                except _FAILURES as error:
                    result, text = "FAILED", str(error).partition("\n")[0]
                    if text in map(str, failed.values()):
                        result, text = "not tried", "for the reason above"
                    else:
                        failed[name] = error
            print(f"{result:<9}  {name:<11} {time.monotonic() - begin:6.1f} s  {text}", flush=True)
        if failed:
            first = next(iter(failed.values()))
            kind = type(first) if isinstance(first, UserError) else UserError
            raise kind(f"the rehearsal failed in {' and '.join(failed)}: see its lines above")

    def data(self) -> str:
        config, parts = self.config, self._parts()
        for part in parts:
            if isinstance(part, sources.RecordsConfig):
                part.manifests()
                for folder in part.located():
                    shard = records.open_records(folder, "train", num_shards=1)
                    self._first_row(sources.corpus_rows(shard, part, config.seed, config.seed)[0])
            elif isinstance(part, sources.TextConfig):
                part.identity()
            else:
                build.build_data(config, range(1))
        if isinstance(config.data, sources.Texts):
            sources.check_unchanged(self.run_dir.path, config.data.identity)
        return ", ".join(type(part).__name__ for part in parts)

    def tokenizer(self) -> str:
        data: Any = self.config.data
        tokenizer = build_tokenizer(data.tokenizer)
        if (read := tokenizer.decode(tokenizer.encode(TEXT))) != TEXT:
            raise DataError(f"the tokenizer reads {TEXT!r} back as {read!r}: take another")
        for part in self._parts():
            if isinstance(part, sources.TextConfig):
                self._first_row(part.rows(self.config.seed)[0])
        return f"{tokenizer.vocab_size:,} entries"

    def _parts(self) -> Sequence[Any]:
        data = self.config.data
        return data.parts if isinstance(data, sources.MixtureConfig) else (data,)

    def _first_row(self, rows: RowSource) -> None:
        Batches(rows, batch_size=1, vocab_size=self.config.model.vocab_size).at(0)

    def model(self) -> str:
        config = self.config
        build.check(config)
        if config.start_from is not None and not self.run_dir.is_claimed:
            plan_start(config)
            with open_checkpoints(RunDirectory(config.start_from)) as checkpoints:
                checkpoints.newest()
        for name in config.trackers:
            TRACKERS.named(name)()
        return f"{config.model.method}, vocabulary of {config.model.vocab_size:,}"

    def evaluations(self) -> str:
        subject = build.untrained(self.config, self.run_dir.path)
        for task in self.config.evaluations:
            task.rows(subject)
        return ", ".join(task.name for task in self.config.evaluations)

    def step(self) -> str:
        config, mesh, (used, _, program) = plan.plan_of(self.config, self.target)
        self.needed = sum(used.values())
        return f"{plan.layout_of(config, mesh)}; {program}"

    def memory(self) -> str:
        there, origin = plan.room(self.target)
        if problem := plan.misfit(self.needed, there):
            raise ResourceError(problem)
        return f"{size(self.needed)} of {size(there)} per device, {origin}"

    def saved(self) -> str:
        """In a folder of its own, which is removed with all folders above that were not there."""
        path = self.run_dir.path
        self.run_dir.fetch()
        self.run_dir.check_free()
        check_kept(self.run_dir)
        self.run_dir.accepted_changes(self.config.to_dict(), self.changes)
        made = [x for x in (path, *path.parents) if not os.path.lexists(x)]
        place = RunDirectory(path / f"{REHEARSAL}{os.getpid()}")
        state = {"params": {"x": jnp.arange(2**16)}, "step": jnp.int32(1)}
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        try:
            with place.lock(), contextlib.closing(Checkpoints(place.checkpoints)) as checkpoints:
                checkpoints.save(1, state)
            if storage.address(path) is not None:
                shutil.rmtree(place.path)  # the copy
            with open_checkpoints(RunDirectory(place.path)) as checkpoints:
                _, found = checkpoints.restore(like)
            if not np.array_equal(found["params"]["x"], state["params"]["x"]):
                raise CheckpointError(f"{storage.shown(path)} gives back other numbers than it got")
        finally:
            shutil.rmtree(place.path, ignore_errors=True)
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if storage.address(path) is not None:
                storage.remove(place.path)
        return f"saved and restored {size(2**18)} in {storage.shown(path)}"
