"""Runs under faults: directories, processes that train them, comparison with undisturbed ones."""

import contextlib
import json
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from tests import commands
from ttcd_jax.errors import UserError
from ttcd_jax.files import write_whole
from ttcd_jax.run.build import build_data
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import METRICS, RunDirectory, load_params
from ttcd_jax.run.reporting import read_metrics

PROGRAM = Path(__file__).parent / "program.py"
CONFIG = Path(__file__).parent / "soak.gin"
STEPS, STOPPED = 240, 75
LIMIT_SECONDS = 200.0  # of a process
HANG_SECONDS = 5  # of two processes
TOLERANCE = 1e-9  # in float64, relative: on another mesh sums have another order
_MIN_LEFT = 24  # steps of a run, for another fault


class Broken(Exception):
    """A run or a process that is not what it should be."""


class Job:
    """Processes of a run that were started together. What each prints is in a file of `logs`; the
    first is expected to print `texts`, to go on from the checkpoint `resumed` (0: none), and each
    to end with one of its `statuses`. One that `is_moved` has another layout than before."""

    def __init__(self, run: "Run", texts: Sequence[str], is_moved: bool) -> None:
        self.run, self.texts, self._is_moved = run, texts, is_moved
        self.processes, self.logs = [], []
        self.statuses: list[Sequence[int]] = []
        self.resumed, self._begun = run.newest, time.monotonic()
        run.jobs.append(self)

    def start(self, devices: int, stdout: int | None, *line: Any) -> None:
        """Starts one of the processes: a command with faults."""
        number = sum(len(job.logs) for job in self.run.jobs)
        log = self.run.folder / f"{self.run.path.name}.{number}.log"
        xla_flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        environment = commands.cpu_environment(XLA_FLAGS=xla_flags)
        with log.open("w") as file:
            pipes = {"stdout": file if stdout is None else stdout, "stderr": file}
            self.processes.append(commands.start(PROGRAM, *line, env=environment, **pipes))
        self.logs.append(log)

    def text(self, number: int = 0) -> str:
        return self.logs[number].read_text(errors="replace")

    def wait(self, is_true: Callable[[], object] = lambda: False, number: int = 0) -> Self:
        """Waits until it `is_true`, or a process ends."""
        while self.processes[number].poll() is None and not is_true():
            if time.monotonic() > self._begun + LIMIT_SECONDS:
                self.kill()
                raise Broken(f"no end in {LIMIT_SECONDS:.0f} s: {self.logs[number]}")
            time.sleep(0.005)
        return self

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def end(self, *statuses: int) -> int:
        """Waits for all; the status of the first. Raises `Broken` for another exit status, a
        traceback, texts not printed, and processes that went on from another checkpoint, or did
        not name the one that they saved when they were stopped."""
        expected = self.statuses or [statuses] * len(self.processes)
        for number, process in enumerate(self.processes):
            self.wait(number=number)
            if (status := process.returncode) not in expected[number]:
                self.kill()
                where = f"instead of {expected[number]} in {self.logs[number]}"
                raise Broken(f"exit status {status} {where}")
            if "Traceback (most recent call last)" in self.text(number):
                raise Broken(f"a traceback in {self.logs[number]}")
        text, status = self.text(), self.processes[0].returncode
        if missing := [x for x in self.texts if not re.search(x, text, re.MULTILINE)]:
            raise Broken(f"{missing[0]!r} is not in {self.logs[0]}")
        found = re.search(r"^resumed at step (\d+)$", text, re.MULTILINE)
        start = int(found[1]) if found else 0
        if self._is_moved:
            self.run.exact = min(self.run.exact, start)
        if "\nstarted in " in text:
            if start != self.resumed:
                raise Broken(f"resumed at step {start} instead of {self.resumed}: {self.logs[0]}")
            stopped = re.search(r"stopped by SIG\w+ at step (\d+), checkpoint saved; run", text)
            saved = int(stopped[1]) if stopped else None
            if status == STOPPED and saved != (newest := max(self.run.steps(""), default=0)):
                raise Broken(f"the step {newest} that it saved is not in {self.logs[0]}")
        return status


class Run:
    """A run directory in `folder` that keeps so many checkpoints, trained by so many processes.
    Until step `exact` it had the layout in which it began."""

    def __init__(self, folder: Path, name: str, keep: int = 3, processes: int = 1) -> None:
        self.folder, self.keep, self.processes, self.path = folder, keep, processes, folder / name
        self.checkpoints, self.records = self.path / "checkpoints", folder / "records"
        self.exact, self.every = STEPS, 4
        self.last = STEPS if processes == 1 else 72  # step of the undisturbed run
        self.jobs: list[Job] = []

    def start(
        self,
        *params: str,
        fault: Sequence[Any] = (),
        victims: Sequence[int] = (0,),
        stop: int = 6,
        devices: int = 1,
        processes: int = 0,
        flags: Sequence[str] = (),
        stdout: int | None = None,
        texts: Sequence[str] = (),
    ) -> Job:
        """The command that trains the run, in so many processes, of which the `victims` inject the
        `fault`; the last is stopped after so many steps. The first prints `texts`."""
        count = processes or self.processes
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        bindings = (
            *(f"RecordsConfig.paths='{self.records}'", f"RunConfig.checkpoint_every={self.every}"),
            *(f"RunConfig.steps={STEPS}", f"RunConfig.keep_checkpoints={self.keep}"),
            *params,
        )
        arguments = [f"--gin={CONFIG}", f"--run_dir={self.path}", *flags]
        arguments += [f"--param={binding}" for binding in bindings]
        job = Job(self, texts, devices > 1 or processes > 0 or "accumulation" in str(params))
        for number in range(count):
            own = [fault] if fault and number in victims else []
            own += [("signals", "step", stop, 0, "SIGTERM")] if number == count - 1 else []
            several = f"--distributed=localhost:{port},{count},{number}"
            hang = f"--hang_seconds={HANG_SECONDS * count // 2}"
            rest = (hang, several) if count > 1 else ()
            job.start(devices, stdout, json.dumps(own), "launch", *arguments, *rest)
        return job

    def evaluation(self, *flags: str, texts: Sequence[str] = ()) -> Job:
        """The command that evaluates the run."""
        task = (f"--run_dir={self.path}", "--task=ppl", "--max_rows=2", "--batch_size=2", *flags)
        job = Job(self, texts, is_moved=False)
        job.start(1, None, "[]", "evaluate", *task)
        return job

    def steps(self, sealed: str = "/DIGEST.json") -> list[int]:
        """The checkpoints with a digest; with "" all that are complete."""
        names = (str(x.relative_to(self.checkpoints)) for x in self.checkpoints.glob(f"*{sealed}"))
        return sorted(int(name) for x in names if (name := x.partition("/")[0]).isdigit())

    @property
    def newest(self) -> int:
        """The checkpoint the run goes on from, or 0; one without a digest only if none has one."""
        return max(self.steps() or self.steps(""), default=0)

    def make_ready(self, count: int) -> None:
        """Trains until there are so many checkpoints with a digest, the newest among them."""
        while len(steps := self.steps()) < count or (count and steps[-1] != self.steps("")[-1]):
            self.start(stop=count * self.every).end(STOPPED)

    def close(self) -> None:
        """Ends processes that are left, when something went wrong."""
        for job in self.jobs:
            with contextlib.suppress(ProcessLookupError):
                job.kill()

    def remove(self) -> None:
        """Removes the directory, and what its processes printed."""
        shutil.rmtree(self.path, ignore_errors=True)
        for path in self.folder.glob(f"{self.path.name}.*.log"):
            path.unlink()


Inject = Callable[[Run, random.Random], Job]


class Fault(NamedTuple):
    """`inject` returns the processes that were hit, each of which ends with one of `statuses`. The
    run is one of so many `processes`, has `checkpoints` before, or is new, or keeps `keep`."""

    inject: Inject
    statuses: tuple[int, ...] = (STOPPED,)
    checkpoints: int = 0
    is_new: bool = False
    keep: int | None = None
    processes: int = 1

    def is_possible(self, run: Run) -> bool:
        """Whether the run has steps left, and the fault needs no other one."""
        is_long = run.newest <= run.last - _MIN_LEFT
        is_alike = self.keep in (None, run.keep) and self.processes == run.processes
        return is_long and is_alike and self.checkpoints <= run.keep and not self.is_new


class Chain:
    """Runs in `folder`: a fault hits the one that the fault before has left, or a new one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.begun = folder, None, 0
        self._whole: dict[int, Run] = {}

    def hit(self, fault: Fault, rng: random.Random, number: int) -> int:
        """The exit status of the process that the fault of this number hit. Raises `Broken` for
        another than expected, and a loss that the undisturbed run has not; its files are kept."""
        if self.run is not None and not fault.is_possible(self.run):
            self.end()
        whole = self.whole(fault.processes)
        if self.run is None:
            self.begun = number
            self.run = Run(self.folder, f"run-{number}", fault.keep or 3, fault.processes)
            self.run.remove()
        run, self.run = self.run, None
        try:
            run.make_ready(fault.checkpoints)
            status = fault.inject(run, rng).end(*fault.statuses)
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
            whole.start(stop=whole.last + is_all).end(0 if is_all else STOPPED)
            self._whole[processes] = whole
        return self._whole[processes]

    def end(self, is_whole: bool = False) -> None:
        """Trains the run a little, or to its end if it `is_whole` or near it, and removes its
        files. Raises `Broken` unless it is as the undisturbed one."""
        if (run := self.run) is None:
            return
        self.run, whole = None, self.whole(run.processes)
        if run.last < STEPS or not (is_whole or run.newest > STEPS - _MIN_LEFT):
            run.start(stop=1).end(STOPPED)
            check_losses(run, whole)
        else:
            run.every = 100
            run.start(stop=STEPS + 1, flags=("--change=RunConfig.checkpoint_every",)).end(0)
            if (done := check_losses(run, whole)) != STEPS:
                raise Broken(f"{run.path / METRICS} has {done} of {STEPS} steps")
            check_files(run, whole)
            run.evaluation().end(0)
        run.remove()


def check_files(run: Run, whole: Run) -> None:
    """Raises `Broken` for files left over, and other parameters than those of `whole`."""
    for path in run.path.rglob("*"):
        is_unfinished = path.name.startswith(".") or "-tmp" in path.name
        if is_unfinished and ".refused" not in str(path):
            raise Broken(f"{path} is left over")
    try:
        with RunDirectory(run.path).lock():
            pass
    except UserError as error:
        raise Broken(str(error)) from error
    with jax.enable_x64(True):
        ours, theirs = (jax.tree.leaves(load_params(x.path)[0]) for x in (run, whole))
    most = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(ours, theirs, strict=True))
    if most > (0.0 if run.exact == STEPS else TOLERANCE):
        raise Broken(f"the parameters of {run.path} differ by {most}")


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


def check_rows(run: Run, noted: Path) -> None:
    """Raises `Broken` unless the processes trained, at every step to the last checkpoint, on every
    row that the configuration gives the step, whatever their number was."""
    config = RunConfig.from_dict(RunDirectory(run.path).read_config())
    batches: Any = build_data(config, range(config.batch_size))[0]
    found = {tuple(line.split()) for line in noted.read_text().splitlines()}
    first, last = (edge(int(step) for step, *_ in found) for edge in (min, max))
    expected = {
        (str(step), str(row), sha256(tokens).hexdigest())
        for step in range(first, last + 1)
        for row, tokens in enumerate(batches.at(step)["tokens"])
    }
    late = {x for x in expected if int(x[0]) >= run.newest}  # not all rows, when they were killed
    if not expected - late <= found <= expected:
        raise Broken(f"{noted} has other rows than those of {run.path}")


def make_records(folder: Path) -> None:
    """Records of drawn text, unless they are there."""
    rng, text = random.Random(0), folder / "records.jsonl"
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    if not (folder / "records").exists():
        lines = (json.dumps({"text": " ".join(rng.choices(words, k=60))}) for _ in range(200))
        write_whole(text, "\n".join(lines))
        places = f"--input={text}", f"--output={folder / 'records'}"
        commands.output("prepare_data", "--tokenizer=byte", "--processes=1", *places)
