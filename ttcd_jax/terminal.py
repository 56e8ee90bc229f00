"""Lines of a run on the terminal: the phases of its start, progress, and the time that is left."""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TextIO

from absl import logging
from tqdm import tqdm

from ttcd_jax import units

_LIVE_SECONDS = 0.2  # between two lines at a terminal
_passed: dict[str, float] = {}  # seconds by phase


def say(line: str) -> None:
    """Prints a line in the first process only."""
    _print(units.printable(line) + "\n", sys.stdout)


def note(line: str) -> None:
    """The same on standard error."""
    _print(units.printable(line) + "\n", sys.stderr)


class Progress:
    """A line of the first process, at a terminal with a bar and overwritten by the next one, else
    one in so many `seconds`, and the time left of `total` units of work by their rate since the
    first call of `left`, which comes after compilation. At that call the rate since `start` units
    counts, if it is given."""

    def __init__(
        self, stream: TextIO, total: float, start: float = math.nan, seconds: float = 10.0
    ) -> None:
        self._stream, self._total, self._seconds = stream, total, seconds
        self.is_live = stream is not None and stream.isatty()
        self._bar: tqdm | None = None
        self._first: tuple[float, float] | None = None
        self.last = (start, time.monotonic())  # (work, seconds) at the last call of `left`
        self._shown = self.last[1]

    def left(self, done: float) -> str:
        """The time left when `done` units are done; empty where there is no rate."""
        first, self.last = self._first or self.last, (done, time.monotonic())
        self._first = self._first or self.last
        if not first[0] < done <= self._total:  # or unknown
            return ""
        seconds = (self.last[1] - first[1]) / (done - first[0]) * max(self._total - done, 0)
        return f"{units.clock(seconds)} left"

    def report(self, done: float, line: str, is_last: bool = False) -> None:
        """Shows a line with the time left, if it is time for one or `is_last`."""
        left, (_, now) = self.left(done), self.last
        if is_last or now - self._shown >= (_LIVE_SECONDS if self.is_live else self._seconds):
            self._shown = now
            self.show(f"{line}, {left}" if left else line, is_last)

    def show(self, line: str, is_last: bool = False) -> None:
        """Shows a line; at a terminal, none overwrites the last one."""
        line = units.printable(line)
        if not self.is_live:
            _print(line + "\n", self._stream)
        elif _is_first():
            with _writing(self._stream):
                self._bar = self._bar or _bar(self._stream, self._total)
                self._bar.n = max(0, self.last[0])  # 0 where that is NaN
                self._bar.set_description_str(line)
            if is_last:
                self.end(is_kept=True)

    def end(self, is_kept: bool = False) -> None:
        """At a terminal, clears the line, or keeps it."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.leave = is_kept
            with _writing(self._stream):
                bar.close()


def _bar(stream: TextIO, total: float) -> tqdm:
    tqdm.monitor_interval = 0  # no thread
    tqdm.set_lock(threading.RLock())  # no semaphore of several processes
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    has_width = os.get_terminal_size(stream.fileno()).columns > 0
    options = {"dynamic_ncols": has_width, "colour": None if is_plain else "green"}
    form = "{bar:20} {percentage:.0f}%  {desc}"
    # The stream as it was before control characters were escaped (`commands.cli`).
    names = {name: getattr(stream, name) for name in ("encoding", "flush", "fileno")}
    raw: Any = SimpleNamespace(**names, write=type(stream).write.__get__(stream))
    return tqdm(total=max(total, 1), file=raw, bar_format=form, **options)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Notes the time of a phase of the start."""
    begin = time.monotonic()
    yield
    _passed[name] = time.monotonic() - begin


def say_started() -> None:
    """Prints the time of all phases since the last call, and of each that took some."""
    phases = [f"{name} {seconds:.1f}" for name, seconds in _passed.items() if seconds >= 0.05]
    say(f"started in {sum(_passed.values()):.1f} s: {', '.join(phases)}")
    _passed.clear()


def _print(text: str, stream: TextIO) -> None:
    if _is_first():
        with _writing(stream):
            print(text, end="", file=stream, flush=True)


def _is_first() -> bool:
    """Whether this is the only process, or the first; asks for no device."""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def _writing(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Python's buffer is discarded: flushing it at exit would replace the exit status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        name = "error" if stream is sys.stderr else "output"
        logging.warning("standard %s cannot be written (%s): the command goes on", name, error)
