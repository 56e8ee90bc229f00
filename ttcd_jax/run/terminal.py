"""Lines on the standard output of a run, and the phases of its start."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from absl import logging

from ttcd_jax import units

_passed: dict[str, float] = {}  # seconds by phase


def say(line: str) -> None:
    """Prints a line in the first process only."""
    show(units.printable(line) + "\n")


def show(text: str) -> None:
    """Prints `text` as it is, in the first process only."""
    import jax  # the first phase imports it

    if jax.process_index() == 0:
        _print(text)


def is_live() -> bool:
    """Whether a line may be overwritten by the next."""
    return sys.stdout is not None and sys.stdout.isatty()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Names a phase of the start on a terminal while it lasts, and notes its time."""
    begin = time.monotonic()
    _show_live(f"{name} ...")
    try:
        yield
    finally:
        _show_live("")
    _passed[name] = time.monotonic() - begin


def say_started() -> None:
    """Prints the time of all phases since the last call, and of each that took some."""
    phases = [f"{name} {seconds:.1f}" for name, seconds in _passed.items() if seconds >= 0.05]
    say(f"started in {sum(_passed.values()):.1f} s: {', '.join(phases)}")
    _passed.clear()


def _show_live(text: str) -> None:
    if is_live():
        _print(f"\r\x1b[K{text}")


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Python's buffer is discarded: flushing it at exit would replace the exit status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        logging.warning("standard output cannot be written (%s): training goes on", error)
