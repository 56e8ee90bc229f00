"""Lines of a run on the terminal: the phases of its start, progress, and the time that is left."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from absl import logging

from ttcd_jax import units

_passed: dict[str, float] = {}  # seconds by phase


def say(line: str) -> None:
    """Prints a line in the first process only."""
    _print(units.printable(line) + "\n", sys.stdout)


class Progress:
    """A line of the first process, at a terminal overwritten by the next one, and the time left of
    `total` units of work by their rate since the first call of `left`, which comes after
    compilation. At that call the rate since `start` units counts, if it is given."""

    def __init__(self, stream: TextIO, total: float, start: float = math.nan) -> None:
        self._stream, self._total = stream, total
        self.is_live = stream is not None and stream.isatty()
        self._first: tuple[float, float] | None = None
        self.last = (start, time.monotonic())  # (work, seconds) at the last call of `left`

    def left(self, done: float) -> str:
        """The time left when `done` units are done; empty where there is no rate."""
        first, self.last = self._first or self.last, (done, time.monotonic())
        self._first = self._first or self.last
        if not done > first[0]:  # or unknown
            return ""
        seconds = (self.last[1] - first[1]) / (done - first[0]) * max(self._total - done, 0)
        return f"{units.clock(seconds)} left"

    def show(self, line: str, is_last: bool = False) -> None:
        """Shows a line; at a terminal, none overwrites the last one."""
        start, end = ("\r\x1b[K", "\n" if is_last else "") if self.is_live else ("", "\n")
        _print(f"{start}{units.printable(line)}{end}", self._stream)


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
    import jax  # the first phase imports it

    try:
        if jax.process_index() == 0:
            print(text, end="", file=stream, flush=True)
    except OSError as error:
        # Python's buffer is discarded: flushing it at exit would replace the exit status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        name = "error" if stream is sys.stderr else "output"
        logging.warning("standard %s cannot be written (%s): the command goes on", name, error)
