"""Runs under faults: their directories, the processes that train them, and their comparison with
undisturbed ones."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tests import commands
from ttcd_jax.errors import UserError
from ttcd_jax.files import write_whole
from ttcd_jax.run.directory import METRICS, RunDirectory, load_params
from ttcd_jax.run.reporting import read_metrics

PROGRAM = Path(__file__).parent / "program.py"
CONFIG = Path(__file__).parent / "soak.gin"
STEPS, STOPPED = 240, 75
LIMIT_SECONDS = 200.0  # of a process
HANG_SECONDS = 5
TOLERANCE = 1e-9  # in float64, relative: on another mesh sums have another order
_MIN_LEFT = 24  # steps of a run, for another fault


class Broken(Exception):
    """A run or a process that is not what it should be."""


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


class Job:
    """Processes that were started together. What each prints is in a file of `logs`; the first is
    expected to print `texts`, to go on from the checkpoint `resumed` (0: none), and each to end
    with one of its `statuses`."""

    def __init__(
        self, processes: Sequence[subprocess.Popen], logs: Sequence[Path], texts: Sequence[str]
    ) -> None:
        self.processes, self.logs, self.texts = processes, logs, texts
        self.statuses: list[Sequence[int]] = []
        self.resumed: int | None = None
        self._begun = time.monotonic()

    def text(self, number: int = 0) -> str:
        return text_of(self.logs[number])

    def send(self, name: signal.Signals, *numbers: int) -> None:
        """Sends a signal to some of the processes, or to all."""
        for number in numbers or range(len(self.processes)):
            self.processes[number].send_signal(name)

    def runs_until(self, is_true: Callable[[], object], number: int = 0) -> bool:
        """Waits until it `is_true`; False if a process ends before."""
        while self.processes[number].poll() is None:
            if is_true():
                return True
            if time.monotonic() > self._begun + LIMIT_SECONDS:
                self.kill()
                raise Broken(f"no end in {LIMIT_SECONDS:.0f} s: {self.logs[number]}")
            time.sleep(0.005)
        return False

    def is_stopped(self, number: int = 0) -> bool:
        """Whether a signal has stopped a process."""
        state = text_of(Path(f"/proc/{self.processes[number].pid}/stat")).rpartition(") ")[2]
        return state.startswith("T")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def end(self, *statuses: int) -> int:
        """Waits for all; the status of the first. Raises `Broken` for another exit
        status, a traceback, and texts not printed."""
        expected = self.statuses or [statuses] * len(self.processes)
        for number, process in enumerate(self.processes):
            self.runs_until(lambda: False, number)
            if (status := process.returncode) not in expected[number]:
                self.kill()
                where = f"instead of {expected[number]} in {self.logs[number]}"
                raise Broken(f"exit status {status} {where}")
            if "Traceback (most recent call last)" in self.text(number):
                raise Broken(f"a traceback in {self.logs[number]}")
        if missing := [x for x in self.texts if not re.search(x, self.text(), re.MULTILINE)]:
            raise Broken(f"{missing[0]!r} is not in {self.logs[0]}")
        return self.processes[0].returncode


class Run:
    """A run directory in `folder` that keeps so many checkpoints, trained by so many processes.
    Until step `exact` it had the layout in which it began."""

    def __init__(self, folder: Path, name: str, keep: int = 3, processes: int = 1) -> None:
        self.folder, self.keep, self.processes, self.path = folder, keep, processes, folder / name
        self.checkpoints, self.records = self.path / "checkpoints", folder / "records"
        self.exact, self.every, self._num_logs = STEPS, 4, 0
        self.jobs: list[Job] = []

    def start(
        self,
        *params: str,
        faults: Mapping[int, Sequence[Any]] | None = None,
        stop: int = 6,
        devices: int = 1,
        processes: int = 0,
        flags: Sequence[str] = (),
        stdout: int | None = None,
        texts: Sequence[str] = (),
    ) -> Job:
        """The command that trains the run, in so many processes: each injects one of its `faults`,
        by its number; the last is stopped after so many steps. The first prints `texts`."""
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
        every = []
        for number in range(count):
            own = [faults[number]] if faults and number in faults else []
            own += [("signals", "step", stop, 0, "SIGTERM")] if number == count - 1 else []
            rest = [f"--hang_seconds={HANG_SECONDS}"]
            rest += [f"--distributed=localhost:{port},{count},{number}"]
            every.append((own, "launch", *arguments, *(rest if count > 1 else ())))
        job = self._job(every, devices, stdout, texts)
        job.resumed = self.newest
        self._is_moved = devices > 1 or processes > 0 or any("accumulation" in x for x in params)
        return job

    def _job(
        self,
        every: Sequence[Sequence[Any]],
        devices: int = 1,
        stdout: int | None = None,
        texts: Sequence[str] = (),
    ) -> Job:
        xla_flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        environment = commands.cpu_environment(XLA_FLAGS=xla_flags)
        processes, logs = [], []
        for faults, *line in every:
            self._num_logs += 1
            logs.append(self.folder / f"{self.path.name}.{self._num_logs}.log")
            with logs[-1].open("w") as log:
                pipes = {"stdout": log if stdout is None else stdout, "stderr": log}
                line = (PROGRAM, json.dumps(faults), *line)
                processes.append(commands.start(*line, env=environment, **pipes))
        self.jobs.append(Job(processes, logs, texts))
        return self.jobs[-1]

    def end(self, job: Job, *statuses: int) -> int:
        """`job.end`, of processes that trained the run: they went on from the newest checkpoint,
        and when they were stopped, saved another one and named its step."""
        status, text = job.end(*statuses), job.text()
        found = re.search(r"^resumed at step (\d+)$", text, re.MULTILINE)
        start = int(found[1]) if found else 0
        if "\nstarted in " in text and start != job.resumed:
            raise Broken(f"resumed at step {start} instead of {job.resumed}: {job.logs[0]}")
        if self._is_moved:
            self.exact = min(self.exact, start)
        if status == STOPPED and "\nstarted in " in text:
            stopped = re.search(r"stopped by SIG\w+ at step (\d+), checkpoint saved; run", text)
            if not stopped or int(stopped[1]) != max(self.steps("")):
                raise Broken(
                    f"the step {self.steps('')[-1:]} that it saved is not in {job.logs[0]}"
                )
        return status

    def steps(self, sealed: str = "/DIGEST.json") -> list[int]:
        """The checkpoints with a digest; with "" all that are complete."""
        names = (str(x.relative_to(self.checkpoints)) for x in self.checkpoints.glob(f"*{sealed}"))
        return sorted(int(name) for x in names if (name := x.partition("/")[0]).isdigit())

    @property
    def last(self) -> int:
        """The last step of the undisturbed run."""
        return STEPS if self.processes == 1 else 72

    @property
    def newest(self) -> int:
        """The checkpoint from which the run goes on, 0 without one: those without a digest are not
        used beside others."""
        return max(self.steps() or self.steps(""), default=0)

    def make_ready(self, count: int) -> None:
        """Trains until there are so many checkpoints with a digest, the newest among them."""
        while len(steps := self.steps()) < count or (count and steps[-1] != self.steps("")[-1]):
            self.end(self.start(stop=count * self.every), STOPPED)

    def evaluation(self, *flags: str, texts: Sequence[str] = ()) -> Job:
        """The command that evaluates the run."""
        task = (f"--run_dir={self.path}", "--task=ppl", "--max_rows=2", "--batch_size=2", *flags)
        return self._job([([], "evaluate", *task)], texts=texts)

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
