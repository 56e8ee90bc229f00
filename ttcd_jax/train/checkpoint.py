"""Checkpoints of a training run: Orbax writes them asynchronously, digests detect damage.

A step directory holds two items, `params` (all that evaluation reads) and `train` (the rest of the
state), plus `DIGEST.json`. On disk a state is a plain nested dict of arrays, and the layers of a
model are stored one by one (`train.layers_on_disk`). Several processes write one step, in parts
that the first one merges; those of a bucket need no disk in common.

A step is *sealed* by its digest, written in the background after Orbax has committed it. A process
killed between the two leaves an unsealed step, complete but not verifiable:

* `step=None` restores the newest sealed and intact step: training repeats the steps after it
  exactly. One warning names the newer ones; a writer renames them to `N.refused`, since Orbax
  would not save them again. If none is sealed and intact, the newest unsealed one is used, with
  a warning;
* an unsealed step that the user names is used with a warning, a damaged one never.
"""

import contextlib
import dataclasses
import errno
import fnmatch
import functools
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from logging import LogRecord, getLogger
from pathlib import Path, PurePath
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from flax.traverse_util import unflatten_dict
from jax.experimental import multihost_utils
from orbax.checkpoint.type_handlers import NumpyHandler, create_type_handler_registry

from ttcd_jax import storage, units
from ttcd_jax.errors import CheckpointError, DataError, ResourceError, UserError, listed
from ttcd_jax.files import full_disk
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.train import digest
from ttcd_jax.train.layers_on_disk import Leaves, by_name, misfit, stacked, unstacked

_LOOKS = 10
_PARAMS = "params"
_TRAIN = "train"
_UNFINISHED = ".orbax-checkpoint-tmp"  # what Orbax adds to the name of a step, and of its items
_PARTS = ("ocdbt.process_{}", "array_metadatas/process_{}")  # what each process writes of an item
OPTIONAL = {"skips"}  # the keys of a state that not every run stores
# Exceptions of Orbax and TensorStore for failed writes: ValueError for a full disk, OSError for a
# missing directory, JaxRuntimeError for a lost process.
_WRITE_ERRORS = (ValueError, OSError, jax.errors.JaxRuntimeError)
# Those for damaged or absent metadata, determined by damaging every file of a step in turn.
_READ_ERRORS = (*_WRITE_ERRORS, KeyError, TypeError, AttributeError, RuntimeError)


def _is_not_orbax(record: LogRecord) -> bool:
    if record.name == "asyncio":  # a line of Orbax, or a file that it writes
        return "orbax" not in record.getMessage()
    return f"{os.sep}orbax{os.sep}" not in record.pathname


@functools.cache
def _silence_orbax() -> None:
    """Keeps Orbax's log off the terminal: its progress, and the failures that it also raises."""
    for name in ("absl", "asyncio"):
        getLogger(name).addFilter(_is_not_orbax)
    report = sys.unraisablehook

    def report_unless_closed(failure: Any) -> None:
        if not str(failure.exc_value).startswith(("Event loop is closed", "Encountered error")):
            report(failure)

    sys.unraisablehook = report_unless_closed


def _to_items(leaves: Leaves) -> dict[str, Any]:
    """The items on disk, nested dicts of leaves: `params`, and all other keys under `train`."""
    tree = unflatten_dict(leaves, sep="/")
    items = {_PARAMS: tree.pop(_PARAMS), _TRAIN: tree}
    return {name: item for name, item in items.items() if item}


def _to_leaves(items: dict[str, Any]) -> Leaves:
    return by_name({_PARAMS: items[_PARAMS], **items.get(_TRAIN, {})})


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return lines[0] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[0][:400]}"


def check_directory(directory: Path) -> None:
    """Raises `UserError` for a folder that Orbax writes to and cannot read back: it takes the path
    for a pattern when it merges the files of the processes."""
    for name in directory.absolute().parts:
        if not fnmatch.fnmatchcase(name, name):
            raise UserError(
                f"checkpoints in {directory} could not be read back, since the brackets of "
                f"{name!r} are a pattern there: choose another folder"
            )


def complete_steps(directory: Path) -> list[int]:
    """The complete steps in `directory`, in ascending order: Orbax commits a step by renaming."""
    return sorted(int(x.name) for x in directory.glob("*") if x.name.isdigit() and x.is_dir())


def fetch_steps(directory: Path) -> None:
    """Makes the steps in the copy of a folder in a bucket those that have a digest there."""
    sealed = {x for x in storage.names(directory) if PurePath(x).match(f"*/{digest.DIGEST}")}

    def digests() -> dict[int, bytes]:
        files = {x: directory / str(x) / digest.DIGEST for x in complete_steps(directory)}
        return {x: files[x].read_bytes() if files[x].is_file() else b"" for x in files}

    before = digests()
    storage.fetch(directory, sealed.__contains__)
    for step, found in digests().items():
        # What a killed process left here is not of the step that others saved since.
        if f"{step}/{digest.DIGEST}" not in sealed or before.get(step, found) != found:
            shutil.rmtree(directory / str(step))
    storage.fetch(directory, sealed.__contains__)


def _writer(name: str) -> int:
    """The process that wrote a file, by its name in a step."""
    found = re.match(r"[^/]+/(?:ocdbt\.|array_metadatas/)process_(\d+)", name)
    return int(found[1]) if found else 0


class Kept(NamedTuple):
    """Orbax' policy that keeps the `newest` steps, those that `every` divides, and the `best` by
    their `scores`. Scores may be added after a step was saved."""

    newest: int = 3
    every: int | None = None
    best: int | None = None
    scores: Mapping[int, float] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [x.step for x in checkpoints]
        scored = sorted((x for x in steps if x in self.scores), key=self.scores.__getitem__)
        kept = {*steps[-self.newest :], *(scored[-self.best :] if self.best else [])}
        return [x in kept or (self.every is not None and x % self.every == 0) for x in steps]


class Checkpoints:
    """The checkpoints of one run, in `directory`.

    A state is a dict of trees of arrays, `params` among its keys. The layers of `model`, stacked on
    the devices, are stored one by one; without a model a state is stored, and read, as it is. With
    `is_read_only` nothing on disk is changed. One writer per directory: opening it deletes the
    unfinished step of a killed writer. A save in progress is lost unless `close` is called.
    """

    handler: ClassVar[Any] = ocp.StandardCheckpointHandler
    save_args: ClassVar[Callable[[Any], Any]] = ocp.args.StandardSave

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: TransformerConfig | None = None,
        kept: Kept | None = None,
        is_read_only: bool = False,
    ) -> None:
        self._directory, self._model = Path(directory).absolute(), model
        self._is_read_only = is_read_only
        if is_read_only and not self._directory.is_dir():
            raise CheckpointError(f"there is no folder {self._directory} yet: train the run first")
        if not is_read_only:
            check_directory(self._directory)
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"{self._directory} cannot hold checkpoints: {error.strerror}; choose another "
                    "run directory"
                ) from error
        _silence_orbax()
        self._barrier = ocp.multihost.get_barrier_sync_fn()
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={x: type(self).handler() for x in (_PARAMS, _TRAIN)},
            options=ocp.CheckpointManagerOptions(
                save_interval_steps=0 if is_read_only else 1,
                preservation_policy=kept or Kept(),
                create=False,
                cleanup_tmp_directories=not is_read_only,
                read_only=is_read_only,
                # Opening must not fail on a damaged step: `restore` handles damage.
                lightweight_initialize=True,
                async_options=ocp.AsyncOptions(
                    barrier_sync_fn=self._exchange,
                    # Creating one in the background would fail only after ten minutes.
                    create_directories_asynchronously=False,
                ),
            ),
        )
        # Of a stopped job Orbax measures the time since the last step, and fails for a step that an
        # earlier process saved.
        self._manager.reached_preemption = lambda step: False
        self._sealer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="seal")
        self._pending: tuple[int, int, Future[None]] | None = None
        self._unreadable: dict[int, str] = {}  # reasons, of steps that are not sealed

    def steps(self) -> list[int]:
        """The complete steps on disk, in ascending order."""
        return complete_steps(self._directory)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Starts writing `state`, which may be donated or deleted afterwards. Waits for the
        previous step, whose failure is raised here: `CheckpointError`, or `ResourceError` for a
        full disk."""
        self.wait()
        items = _to_items(self._on_disk(by_name(state)))
        args = ocp.args.Composite(**{x: type(self).save_args(items[x]) for x in items})
        need = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        with self._reporting_write(step, need):
            self._check_directory(step, need)
            self._clear(step, items)
            is_started = self._manager.save(step, args=args)
        assert is_started, f"Orbax left step {step} out"
        self._pending = step, need, self._sealer.submit(self._seal, step)

    def wait(self) -> None:
        """Blocks until the last step is on disk and sealed. Raises `CheckpointError` if not."""
        if self._pending is None:
            return
        (step, need, sealed), self._pending = self._pending, None
        with self._reporting_write(step, need):
            self._manager.wait_until_finished()
            sealed.result()

    def close(self) -> None:
        """Waits, then frees the threads; the object cannot be used afterwards."""
        try:
            self.wait()
        finally:
            self._sealer.shutdown()
            with contextlib.suppress(*_WRITE_ERRORS):  # of the write that `wait` has reported
                self._manager.close()

    def newest(self) -> int:
        """The step that `restore` takes, by the policy above. Raises `CheckpointError` for none."""
        return self._judged(None)[0]

    def restore(
        self, abstract_state: dict[str, Any], step: int | None = None
    ) -> tuple[int, dict[str, Any]]:
        """(step, state) of `step`, or of the newest intact one by the policy above.

        `abstract_state` has a `jax.ShapeDtypeStruct` with its sharding for every array to read; the
        `OPTIONAL` keys that the step lacks are left out. Raises `CheckpointError` for damage, and
        for different names, shapes or dtypes (Orbax would cast).
        """
        self.wait()
        for _ in range(_LOOKS):
            seen = self._files(), {*self._unreadable}
            try:
                return self._restore(abstract_state, step)
            except CheckpointError:
                time.sleep(0.1)  # a run that deletes the step goes on with it
                if seen == (self._files(), {*self._unreadable}) or jax.process_count() > 1:
                    raise
            self._manager.reload()
        raise CheckpointError(
            f"{self._directory} loses its steps faster than they are read: keep more of them "
            "(RunConfig.keep_checkpoints), or read them when the run is over"
        )

    def _restore(
        self, abstract_state: dict[str, Any], step: int | None
    ) -> tuple[int, dict[str, Any]]:
        # The first process alone reads the disk, so that all agree even while a job writes.
        chosen, refused = self._judged(step) if jax.process_index() == 0 else (0, [])
        chosen = int(multihost_utils.broadcast_one_to_all(np.array(chosen)))
        copy, number = storage.fetch(self._step_dir(chosen)), jax.process_index()
        if number and storage.address(copy) and (problems := digest.verify(copy)):
            raise CheckpointError(
                f"checkpoint step {chosen} is damaged in the copy of process {number}: "
                f"{listed(problems, 1)}; remove {copy} on its machine"
            )
        with self._reporting_read(chosen):
            metadata = self._manager.item_metadata(chosen)
        if {_PARAMS, _TRAIN} & {*metadata} == {_PARAMS} != {*abstract_state}:
            raise CheckpointError(
                f"checkpoint step {chosen} holds parameters alone, no run can go on from it: start "
                "another run from it (RunConfig.start_from)"
            )
        with self._reporting_read(chosen):
            absent = {x for x in OPTIONAL & {*abstract_state} if x not in metadata[_TRAIN].tree}
            abstract_state = {x: abstract_state[x] for x in abstract_state if x not in absent}
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])  # if there is no other
            wanted = by_name(abstract_state)
            wanted = {x: y.update(sharding=y.sharding or here) for x, y in wanted.items()}
            items = _to_items(self._on_disk(wanted))
            stored = {name: metadata[name].tree for name in items}
        problem = misfit(_to_leaves(items), _to_leaves(stored), ("shape", "dtype"))
        if problem:
            raise CheckpointError(
                f"checkpoint step {chosen} is of another model: {problem}; build the model from "
                "the configuration of its run"
            )
        args = ocp.args.Composite(**{x: ocp.args.StandardRestore(items[x]) for x in items})
        with self._reporting_read(chosen):
            leaves = _to_leaves({**self._manager.restore(chosen, args=args)})
        if not self._is_read_only:
            self._set_aside(chosen, refused)
        if self._model is not None:
            leaves = stacked(self._model, leaves, wanted)
        ordered = [leaves[name] for name in wanted]
        return chosen, jax.tree.unflatten(jax.tree.structure(abstract_state), ordered)

    def _on_disk(self, leaves: Leaves) -> Leaves:
        return leaves if self._model is None else unstacked(self._model, leaves)

    def _step_dir(self, step: int | str) -> Path:
        return self._directory / str(step)

    def _unfinished(self, step: int | str, *item: str) -> Path:
        """Where Orbax writes a step: an item, or a file by its name in the step."""
        places = (f"{name}{_UNFINISHED}" for name in (step, *item[:1]))
        return self._directory.joinpath(*places, *item[1:])

    def _clear(self, step: int, items: dict[str, Any]) -> None:
        """Removes what a killed job left of the step in a bucket, and makes the folders for which
        Orbax waits on a disk that the first process does not see."""
        if storage.address(self._directory) is None:
            return
        if (number := jax.process_index()) == 0:
            storage.remove(self._step_dir(step))
        for name in items if number else ():
            arrays, metadata = (self._unfinished(step, name, x.format(number)) for x in _PARTS)
            shutil.rmtree(arrays, ignore_errors=True)
            metadata.parent.mkdir(parents=True, exist_ok=True)
            metadata.unlink(missing_ok=True)

    def _exchange(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier. At the one after the files of a step every other process uploads its own
        for a bucket, and then the first downloads those that it does not see, to merge them. A
        process whose save failed waits for none, since the others wait for it: it ends."""
        if sys.exception() is not None:
            return
        _, is_written, step = key.partition("async_write_complete.")
        final, number = self._step_dir(step), jax.process_index()
        if is_written and number:
            own = (x for y in _PARTS for x in self._unfinished(step).glob(f"*/{y.format(number)}"))
            storage.push(*own, target=lambda x: Path(str(x).replace(_UNFINISHED, "")))
        self._barrier(key=key, timeout_ms=timeout_ms)
        if is_written and not number:
            depth = len(final.parts)
            storage.fetch(final, _writer, lambda x: self._unfinished(step, *x.parts[depth:]))

    def _files(self) -> set[str]:
        return {f"{where}/{name}" for where, _, names in os.walk(self._directory) for name in names}

    def _seal(self, step: int) -> None:
        self._manager.wait_until_finished()
        if jax.process_index():  # its part on a disk of its own
            shutil.rmtree(self._unfinished(step), ignore_errors=True)
        else:
            self._manager.item_metadata(step)  # opens every array
            storage.push_held(self._directory.parent)
            final = self._step_dir(step)
            files = (x for x in final.rglob("*") if x.is_file())
            storage.push(*(x for x in files if not _writer(x.relative_to(final).as_posix())))
            digest.seal(final)  # which a bucket gets last
            if storage.address(self._directory) is not None:
                for old in {name.split("/")[0] for name in storage.names(self._directory)}:
                    if not (self._directory / old).is_dir():
                        storage.remove(self._directory / old)

    def _check_directory(self, step: int, need: int) -> None:
        where, steps = self._directory, self.steps()
        if self._is_read_only:
            raise CheckpointError(f"{where} was opened read-only")
        if steps and steps[-1] >= step:
            raise CheckpointError(
                f"step {steps[-1]} is already in {where}, so remove the steps from {step} on or "
                "choose another run directory"
            )
        if need > shutil.disk_usage(where).free:
            raise OSError(os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def _reporting_read(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, _READ_ERRORS) and type(error) is not Exception:  # of Orbax
                raise
            reason = f"cannot be read: {_reason(error)}"
            if not digest.is_sealed(self._step_dir(step)):
                self._unreadable[step] = reason
            raise CheckpointError(
                f"checkpoint step {step} {reason}; restore a copy, or take an older step"
            ) from error

    @contextlib.contextmanager
    def _reporting_write(self, step: int, need: int) -> Iterator[None]:
        """Turns a failed write of about `need` bytes into a `UserError` with the last good step."""
        try:
            yield
        except DataError:  # of the file of a `StreamedLeaf`
            raise
        except _WRITE_ERRORS as error:
            # Orbax has already removed from its list the steps that this one was to replace.
            self._manager.reload()
            kind, reason = CheckpointError, _reason(error)
            if full := full_disk(error):
                kind, free = ResourceError, shutil.disk_usage(self._directory).free
                disk = os.statvfs(self._directory)
                files = " and no inode" if disk.f_files and not disk.f_favail else ""
                reason = (
                    f"{full} (it needs about {units.size(need)}, {self._directory} has "
                    f"{units.size(free)}{files} free), so make room or keep fewer steps"
                )
            sealed = [good for good in self.steps() if digest.is_sealed(self._step_dir(good))]
            good = sealed[-1] if sealed else "none"
            if jax.process_index() and storage.address(self._directory):
                good = "in the log of process 0"
            raise kind(
                f"checkpoint step {step} was not saved: {reason}; last good step: {good}"
            ) from error

    def _judged(self, step: int | None) -> tuple[int, list[int]]:
        """(step to restore, those that were refused) by the policy above."""
        steps, where = self.steps(), self._directory
        if not steps:
            raise CheckpointError(f"there is no checkpoint in {where}")
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps))
            raise CheckpointError(f"there is no checkpoint step {step} in {where}; steps: {there}")
        candidates = [known for known in reversed(steps) if step is None or known <= step]
        unsealed = [x for x in candidates if not digest.is_sealed(self._step_dir(x))]
        unsealed = [x for x in unsealed if x not in self._unreadable]
        is_unchecked = candidates[0] in unsealed and (step is not None or unsealed == candidates)
        chosen, refused = candidates[0] if is_unchecked else None, {}
        while chosen is None and len(refused) < len(candidates):
            known = candidates[len(refused)]
            reason = self._unreadable.get(known)
            storage.fetch(self._step_dir(known))
            if problems := [reason] if reason else digest.verify(self._step_dir(known)):
                refused[known] = listed(problems, 1)
            else:
                chosen = known
        if chosen is None and step is None and unsealed:
            # Its writer was killed while it deleted the step before.
            chosen, is_unchecked = unsealed[0], True
            del refused[chosen]
        if is_unchecked:
            text = "checkpoint step %d in %s is used unchecked: its writer has not written %s, or "
            logging.warning(text + "not yet", chosen, where, digest.DIGEST)
        if step is not None and refused:
            remedy = "no intact step precedes it" if chosen is None else f"pass step={chosen}"
            raise CheckpointError(f"checkpoint step {step} is damaged: {refused[step]}; {remedy}")
        reasons = ", ".join(f"step {known} ({reason})" for known, reason in refused.items())
        if chosen is None:
            raise CheckpointError(
                f"no checkpoint in {where} is intact: {reasons}; restore a copy, or start anew in "
                "another run directory"
            )
        if refused:
            logging.warning(
                "refused damaged or unsealed checkpoint %s; using step %d", reasons, chosen
            )
        return chosen, list(refused)

    def _set_aside(self, chosen: int, refused: list[int]) -> None:
        """Renames `refused`, once every process has restored, so that Orbax ignores them. Deletes
        earlier ones, which would fill the disk, and other machines' copies of their digests."""
        multihost_utils.sync_global_devices("checkpoints: refused")
        for aside in self._directory.glob("*.refused") if refused else ():
            shutil.rmtree(aside, ignore_errors=True)
        for step in refused:
            self._step_dir(step).rename(self._directory / f"{step}.refused")
        multihost_utils.sync_global_devices("checkpoints: set aside")
        for step in self.steps() if jax.process_index() else ():
            if step > chosen and storage.address(self._directory):
                shutil.rmtree(self._step_dir(step), ignore_errors=True)
        self._manager.reload()


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedLeaf:
    """An array that `read` gives; its shape and dtype are known before."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _StreamingHandler(NumpyHandler):
    """Writes every leaf as the array that it reads, before it reads the next."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[Any]:
        for value, info, arg in zip(values, infos, args or [None] * len(values), strict=True):
            for written in await super().serialize([value.read()], [info], arg and [arg]):
                written.result()
        return []


class StreamedCheckpoints(Checkpoints):
    """Writes states whose leaves are `StreamedLeaf`s, under their names on disk."""

    save_args = ocp.args.PyTreeSave

    @staticmethod
    def handler() -> ocp.PyTreeCheckpointHandler:
        streaming = _StreamingHandler(deepcopy_host_arrays=False)
        registry = create_type_handler_registry((StreamedLeaf, streaming))
        return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
