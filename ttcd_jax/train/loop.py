"""The training loop: steps and periodic callbacks."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped

from ttcd_jax.data.pipeline import Fields, StepBatches
from ttcd_jax.train.bad_steps import fault
from ttcd_jax.train.state import TrainState
from ttcd_jax.train.step import Batch, Metrics, TrainStep

HostMetrics = dict[str, Shaped[np.ndarray, "..."]]


class MetricCallback(NamedTuple):
    """Called with (steps done, metrics of that step) every `every` steps and after bad steps, one
    step late. `data_seconds` among them: the time that the loop has waited for batches so far, and
    `callback_seconds`, that of state callbacks, which evaluate and save."""

    every: int
    call: Callable[[int, HostMetrics], None]


class StateCallback(NamedTuple):
    """Called with (steps done, state) every `every` steps, where `is_due(steps done)`, and when
    training ends or is stopped, only once the step is known to be finite or skipped."""

    every: int
    call: Callable[[int, TrainState], None]
    is_due: Callable[[int], bool] = lambda step: False


def train(
    state: TrainState,
    train_step: TrainStep,
    batches: StepBatches,
    *,
    start: int,
    steps: int,
    on_bad: Callable[[int, str, HostMetrics], None],
    placement: Callable[[Fields], Batch] = jax.device_put,
    on_metrics: Sequence[MetricCallback] = (),
    on_state: Sequence[StateCallback] = (),
    is_stopping: Callable[[int], bool] = lambda step: False,
) -> tuple[TrainState, int]:
    """(state, steps done) after steps `start` to `steps`, or earlier if `is_stopping(steps done)`.

    `placement` puts a batch on the devices. Metrics are fetched while the next step runs. Calls
    `on_bad(steps done, reason, metrics)` for a bad step, before a state callback receives its
    state; training goes on if it returns.
    """
    done, pending, waited, called = start, None, 0.0, 0.0
    stream = batches.iterate(start, steps - start)

    def report(number: int, metrics: Metrics) -> None:
        host = jax.device_get(metrics)
        if reason := fault(host):
            on_bad(number, reason, host)
        host["data_seconds"], host["callback_seconds"] = np.asarray(waited), np.asarray(called)
        for callback in on_metrics:
            if number % callback.every == 0 or number == steps or reason:
                callback.call(number, host)

    while done < steps:
        begin = time.monotonic()
        step, batch = next(stream)
        waited += time.monotonic() - begin
        placed = placement(batch)
        with jax.transfer_guard("disallow"):
            state, metrics = train_step(state, placed)
        done = step + 1
        if pending is not None:
            report(*pending)
        pending = (done, metrics)
        is_last = done == steps or is_stopping(done)
        due = [x for x in on_state if is_last or done % x.every == 0 or x.is_due(done)]
        if due or is_last:
            report(*pending)
            pending, begin = None, time.monotonic()
            for callback in due:
                callback.call(done, state)
            called += time.monotonic() - begin
        if is_last:
            break
    return state, done
