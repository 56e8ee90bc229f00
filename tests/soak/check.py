"""Run directories under faults, one after the other, and their comparison with undisturbed ones."""

import json
import random
from pathlib import Path

import jax
import numpy as np

from tests import commands
from tests.soak.faults import Fault
from tests.soak.run import STEPS, STOPPED, Broken, Run
from ttcd_jax.errors import UserError
from ttcd_jax.files import write_whole
from ttcd_jax.run.directory import METRICS, RunDirectory, load_params
from ttcd_jax.run.reporting import read_metrics

TOLERANCE = 1e-9  # in float64, relative: on another mesh sums have another order
_MIN_LEFT = 24  # steps of a run, for another fault


class Chain:
    """Runs in `folder`: a fault hits the one that the fault before has left, or a new one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.begun = folder, None, 0
        self._whole: dict[int, Run] = {}

    def hit(self, fault: Fault, rng: random.Random, number: int) -> int:
        """The exit status of the process that the fault of this number hit. Raises `Broken` for
        another than expected, and for a loss that the undisturbed run has not; the files of the run
        are then kept."""
        if self.run is not None and not _is_possible(fault, self.run):
            self.end()
        whole = self.whole(fault.processes)
        if self.run is None:
            self.begun = number
            self.run = Run(self.folder, f"run-{number}", fault.keep or 3, fault.processes)
            self.run.remove()
        run, self.run = self.run, None
        try:
            run.make_ready(fault.checkpoints)
            job = fault.inject(run, rng)
            status = run.end(job, *fault.statuses)
            check_losses(run, whole)
        finally:
            run.close()
        self.run = run
        return status

    def whole(self, processes: int) -> Run:
        """The undisturbed run of so many processes."""
        if processes not in self._whole:
            make_records(self.folder)
            whole = Run(self.folder, f"undisturbed-{processes}", processes=processes)
            whole.remove()  # of another version, perhaps
            whole.every = 100
            is_all = whole.last == STEPS
            whole.end(whole.start(stop=whole.last + is_all), 0 if is_all else STOPPED)
            self._whole[processes] = whole
        return self._whole[processes]

    def end(self, is_whole: bool = False) -> None:
        """Trains the run a little, or to its end if it `is_whole` or near it, and removes its
        files. Raises `Broken` unless it is as the undisturbed one."""
        if (run := self.run) is None:
            return
        self.run, whole = None, self.whole(run.processes)
        is_whole = run.last == STEPS and (is_whole or run.newest > STEPS - _MIN_LEFT)
        if not is_whole:
            run.end(run.start(stop=1), STOPPED)
            check_losses(run, whole)
            run.remove()
            return
        run.every = 100
        run.end(run.start(stop=STEPS + 1, flags=("--change=RunConfig.checkpoint_every",)), 0)
        if (done := check_losses(run, whole)) != STEPS:
            raise Broken(f"{run.path / METRICS} has {done} of {STEPS} steps")
        unfinished = [
            path
            for path in run.path.rglob("*")
            if ".refused" not in str(path) and (path.name.startswith(".") or "-tmp" in path.name)
        ]
        if unfinished:
            raise Broken(f"{unfinished[0]} is left over")
        try:
            with RunDirectory(run.path).lock():
                pass
        except UserError as error:
            raise Broken(str(error)) from error
        with jax.enable_x64(True):
            ours, theirs = (jax.tree.leaves(load_params(x.path).params) for x in (run, whole))
        most = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(ours, theirs, strict=True))
        if most > (0.0 if run.exact == STEPS else TOLERANCE):
            raise Broken(f"the parameters of {run.path} differ by {most}")
        run.evaluation().end(0)
        run.remove()


def _is_possible(fault: Fault, run: Run) -> bool:
    """Whether the run has steps left, and the fault needs no other one."""
    is_long = run.newest <= run.last - _MIN_LEFT
    is_alike = fault.keep in (None, run.keep) and fault.processes == run.processes
    return is_long and is_alike and fault.checkpoints <= run.keep and not fault.is_new


def check_losses(run: Run, whole: Run) -> int:
    """The number of steps reported. Raises `Broken` unless each is there once, in order, and has
    the loss and the norm of the gradient of `whole`."""
    ours, theirs = (
        [record for record in read_metrics(each.path / METRICS) if "loss" in record]
        for each in (run, whole)
    )
    steps = [record["step"] for record in ours]
    if steps != [*range(1, len(ours) + 1)] or len(ours) > len(theirs):
        raise Broken(f"{run.path / METRICS} has not every step once and in order")
    for mine, other in zip(ours, theirs, strict=False):
        tolerance = 0.0 if mine["step"] <= run.exact else TOLERANCE
        for name in ("loss", "grad_norm"):
            if not abs(mine[name] - other[name]) <= tolerance * abs(other[name]):
                raise Broken(
                    f"{name} {mine[name]!r} instead of {other[name]!r} at step {mine['step']} of "
                    f"{run.path}, exact to step {run.exact}"
                )
    return len(ours)


def make_records(folder: Path) -> None:
    """Records of drawn text, `records` and `others`, unless they are there."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    for name in ("records", "others"):
        text = folder / f"{name}.jsonl"
        if not (folder / name).exists():
            lines = (json.dumps({"text": " ".join(rng.choices(words, k=60))}) for _ in range(200))
            write_whole(text, "\n".join(lines))
            places = f"--input={text}", f"--output={folder / name}"
            commands.output("prepare_data", "--tokenizer=byte", "--processes=1", *places)
