"""Traces of training steps by JAX's profiler, of a window set at the start or after a SIGUSR2: of
the steps after the n-th in `<directory>/step_<n>`, for TensorBoard's profile plugin (`xprof`)."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import jax

from ttcd_jax.errors import UserError
from ttcd_jax.train.state import TrainState
from ttcd_jax.train.step import Batch, Metrics, TrainStep

STEPS_PER_SIGNAL = 3


def step_window(text: str, steps: int) -> range:
    """The steps START to STOP - 1, counted from 0, of the text START:STOP. Raises `UserError`."""
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
    """`step`, whose first call takes step `start`, with traces of the steps of `window`, and of the
    next three after a SIGUSR2. A trace covers whole steps: the devices are idle at both ends."""
    done, is_requested, is_tracing = start, False, False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        is_requested = True

    def traced(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        nonlocal done, is_requested, is_tracing, window
        if is_requested and not is_tracing:
            window = range(done, done + STEPS_PER_SIGNAL)
        is_requested = False
        if done in window and not is_tracing:
            jax.block_until_ready(state)
            trace.enter_context(jax.profiler.trace(directory / f"step_{done}"))
            is_tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=done):
            result = step(state, batch)
        done += 1
        if is_tracing and done not in window:
            jax.block_until_ready(result)
            trace.close()
            is_tracing = False
        return result

    with contextlib.ExitStack() as handlers, contextlib.ExitStack() as trace:
        handlers.callback(signal.signal, signal.SIGUSR2, signal.signal(signal.SIGUSR2, request))
        yield traced
