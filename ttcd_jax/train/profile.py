"""Traces of training steps by JAX's profiler: a window asked for at the start, or SIGUSR2.

A trace of the steps that follow the n-th lies in `<directory>/step_<n>`, for TensorBoard's profile
plugin (`xprof`).
"""

import contextlib
import functools
import signal
from collections.abc import Iterator
from pathlib import Path

import jax

from ttcd_jax.errors import UserError
from ttcd_jax.train.state import TrainState
from ttcd_jax.train.step import Batch, Metrics, TrainStep

STEPS_PER_SIGNAL = 3


def step_window(text: str, steps: int) -> range:
    """START:STOP as the steps after START are done and until STOP are. Raises `UserError`."""
    first, _, last = text.partition(":")
    if first.isdecimal() and last.isdecimal() and int(first) < int(last) <= steps:
        return range(int(first), int(last))
    raise UserError(
        f"profile {text!r} is not START:STOP with 0 <= START < STOP <= {steps}, the run's steps"
    )


@contextlib.contextmanager
def profiled(
    step: TrainStep, directory: Path, *, start: int, window: range = range(0)
) -> Iterator[TrainStep]:
    """`step`, whose first call takes step `start`: the steps of `window` are traced, and after a
    SIGUSR2 the next three. A trace holds whole steps: the devices are idle at both its ends."""
    profiler = _Profiler(directory, start, window)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: profiler.request())
    try:
        yield functools.partial(profiler.take, step)
    finally:
        signal.signal(signal.SIGUSR2, before)
        profiler.stop()


class _Profiler:
    """Counts the steps done and knows which of them to trace."""

    def __init__(self, directory: Path, done: int, window: range) -> None:
        self._directory, self._done, self._window = directory, done, window
        self._is_requested = self._is_tracing = False

    def request(self) -> None:
        self._is_requested = True

    def take(self, step: TrainStep, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if self._is_requested and not self._is_tracing:
            self._window = range(self._done, self._done + STEPS_PER_SIGNAL)
        self._is_requested = False
        if self._done in self._window and not self._is_tracing:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._directory / f"step_{self._done}")
            self._is_tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=self._done):
            result = step(state, batch)
        self._done += 1
        if self._is_tracing and self._done not in self._window:
            jax.block_until_ready(result)
            self.stop()
        return result

    def stop(self) -> None:
        if self._is_tracing:
            jax.profiler.stop_trace()
            self._is_tracing = False
