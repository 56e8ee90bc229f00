"""A run under faults: its directory, and its processes, which are forks of this one."""

import ctypes
import faulthandler
import functools
import os
import re
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

CONFIG = Path(__file__).parent / "soak.gin"
STEPS, STOPPED = 60, 75
LIMIT_SECONDS = 240.0  # of a process
FLAGS = ("folder", "seed", "faults", "first", "kind")
_PR_SET_PDEATHSIG = 1


class Broken(Exception):
    """A run or a process that is not what it should be."""


class Forked(BaseException):
    """Unwinds the frames of the parent in a fork, whose outermost frame then calls `become`."""

    def __init__(self, become: Callable[[], object]) -> None:
        self.become = become


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


class Child:
    """A fork of this process, which has imported JAX and started no threads, that calls `program`;
    its output is in `log`, and `texts` are expected there."""

    def __init__(self, program: Callable[[], object], log: Path, devices: int = 1) -> None:
        self.log = log
        self.texts: tuple[str, ...] = ()
        self.status: int | None = None
        sys.stdout.flush()
        self._begun = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            raise Forked(functools.partial(_become, program, log, devices))

    @property
    def text(self) -> str:
        return text_of(self.log)

    @property
    def num_steps(self) -> int:
        """The steps that it has reported."""
        return self.text.count("\nstep ")

    @property
    def last_step(self) -> int:
        return max(map(int, re.findall(r"^step +(\d+)/", self.text, re.MULTILINE)), default=0)

    def send(self, *numbers: int) -> None:
        """Sends signals, unless it has ended."""
        for number in numbers if self.status is None else ():
            os.kill(self.pid, number)
            time.sleep(0.02)

    def runs_until(self, is_true: Callable[[], object]) -> bool:
        """Waits until it `is_true`; False if the process ends before."""
        while self.status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
            elif is_true():
                return True
            elif time.monotonic() > self._begun + LIMIT_SECONDS:
                self.send(signal.SIGCONT, signal.SIGABRT, signal.SIGKILL)  # the second: stacks
                raise Broken(f"no end in {LIMIT_SECONDS:.0f} s, the stacks are in {self.log}")
            else:
                time.sleep(0.002)
        return False

    def end(self, *statuses: int) -> None:
        """Waits. Raises `Broken` for another exit status, a traceback, and texts not printed."""
        self.runs_until(lambda: False)
        text, where = self.text, f"in {self.log}"
        if self.status not in statuses:
            raise Broken(f"exit status {self.status} instead of {statuses} {where}")
        if missing := [x for x in self.texts if x not in text]:
            raise Broken(f"{missing[0]!r} is not {where}")
        if "Traceback" in text:
            raise Broken(f"a traceback {where}")


def _become(program: Callable[[], object], log: Path, devices: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for standard in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), standard)
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    faulthandler.enable()
    program()


def become_command(name: str, *arguments: str) -> None:
    """Becomes `python -m experiments.NAME`, in float64."""
    import jax
    from absl import flags

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    flags.FLAGS.remove_flag_values([flag for flag in FLAGS if flag in flags.FLAGS])
    sys.argv[1:] = arguments
    runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)


class Run:
    """A run directory in `folder` that keeps so many checkpoints. Until step `exact` it was on one
    device in one part."""

    def __init__(self, folder: Path, name: str, keep: int = 3) -> None:
        self.folder, self.keep, self.path = folder, keep, folder / name
        self.checkpoints, self.records = self.path / "checkpoints", folder / "records"
        self.exact, self._logs = STEPS, 0

    def log(self) -> Path:
        """A new file for what a process prints."""
        self._logs += 1
        return self.folder / f"{self.path.name}.{self._logs}.log"

    def start(
        self,
        *params: str,
        devices: int = 1,
        flags: tuple[str, ...] = (),
        before: Callable[[], object] = lambda: None,
    ) -> Child:
        """The command that trains the run, in a process that calls `before` first."""
        bindings = (
            f"RecordsConfig.paths='{self.records}'",
            f"RunConfig.steps={STEPS}",
            f"RunConfig.keep_checkpoints={self.keep}",
            *params,
        )
        arguments = (
            *(f"--gin={CONFIG}", f"--run_dir={self.path}", *flags),
            *(f"--param={binding}" for binding in bindings),
        )
        child = Child(lambda: (before(), become_command("launch", *arguments)), self.log(), devices)
        self._is_moved = bool(params or flags) or devices > 1
        return child

    def end(self, child: Child, *statuses: int) -> None:
        """`child.end`, of a process that trained the run."""
        child.end(*statuses)
        if self._is_moved:
            resumed = re.search(r"resumed at step (\d+)", child.text)
            self.exact = min(self.exact, int(resumed[1]) if resumed else 0)

    def steps(self, sealed: str = "/DIGEST.json") -> list[int]:
        """The checkpoints with a digest; with "" all that are complete."""
        names = (str(x.relative_to(self.checkpoints)) for x in self.checkpoints.glob(f"*{sealed}"))
        return sorted(int(name) for x in names if (name := x.partition("/")[0]).isdigit())

    def is_ready(self, count: int) -> bool:
        """Whether there are so many checkpoints with a digest, the newest among them."""
        steps = self.steps()
        return not count or (len(steps) >= count and steps[-1] == self.steps("")[-1])

    def make_ready(self, count: int) -> None:
        """Trains until `is_ready`."""
        if not self.is_ready(count):
            child = self.start()
            child.runs_until(lambda: self.is_ready(count))
            child.send(signal.SIGTERM)
            self.end(child, STOPPED, 0)

    def evaluation(self) -> Child:
        """The command that evaluates the run."""
        task = (f"--run_dir={self.path}", "--task=ppl", "--max_rows=2", "--batch_size=2")
        return Child(lambda: become_command("evaluate", *task), self.log())

    def remove(self) -> None:
        """Removes the directory, and what its processes printed."""
        shutil.rmtree(self.path, ignore_errors=True)
        for path in self.folder.glob(f"{self.path.name}.*.log"):
            path.unlink()
