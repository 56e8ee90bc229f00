"""A run under faults: its directory, and the processes that train it."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import commands

PROGRAM = Path(__file__).parent / "program.py"
CONFIG = Path(__file__).parent / "soak.gin"
STEPS, STOPPED = 240, 75
LIMIT_SECONDS = 200.0  # of a process
HANG_SECONDS = 5


class Broken(Exception):
    """A run or a process that is not what it should be."""


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


class Job:
    """Processes that were started together. What each prints is in a file of `logs`; the first is
    expected to print `texts`, to go on from the checkpoint `resumed` (0: none), and each to end
    with one of its `statuses`."""

    def __init__(self, processes: Sequence[subprocess.Popen], logs: Sequence[Path]) -> None:
        self.processes, self.logs = processes, logs
        self.texts: tuple[str, ...] = ()
        self.statuses: list[Sequence[int]] = []
        self.resumed: int | None = None
        self._begun = time.monotonic()

    def text(self, number: int = 0) -> str:
        return text_of(self.logs[number])

    @property
    def num_steps(self) -> int:
        """The steps that it has reported."""
        return self.text().count("\nstep ")

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
                where = f"instead of {expected[number]} in {self.logs[number]}"
                self.kill()
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
    ) -> Job:
        """The command that trains the run, in so many processes: each injects one of its `faults`,
        by its number; the last is stopped after so many steps."""
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
        job = self._job(every, devices, stdout)
        job.resumed = self.newest
        self._is_moved = devices > 1 or processes > 0 or any("accumulation" in x for x in params)
        return job

    def _job(
        self, every: Sequence[Sequence[Any]], devices: int = 1, stdout: int | None = None
    ) -> Job:
        flag = f"--xla_force_host_platform_device_count={devices}"
        options: dict[str, Any] = {
            "env": commands.cpu_environment(XLA_FLAGS=f"{os.environ['XLA_FLAGS']} {flag}")
        }
        processes, logs = [], []
        for faults, command, *arguments in every:
            self._num_logs += 1
            logs.append(self.folder / f"{self.path.name}.{self._num_logs}.log")
            with logs[-1].open("w") as log:
                options |= {"stdout": log if stdout is None else stdout, "stderr": log}
                line = (json.dumps(faults), command, *arguments)
                processes.append(commands.start(PROGRAM, *line, **options))
        self.jobs.append(Job(processes, logs))
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

    def evaluation(self, *flags: str) -> Job:
        """The command that evaluates the run."""
        task = (f"--run_dir={self.path}", "--task=ppl", "--max_rows=2", "--batch_size=2", *flags)
        return self._job([([], "evaluate", *task)])

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
