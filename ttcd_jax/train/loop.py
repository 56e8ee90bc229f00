"""The training loop: steps and periodic callbacks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ttcd_jax.data.pipeline import StepBatches
from ttcd_jax.errors import NonFiniteError
from ttcd_jax.train.state import TrainState
from ttcd_jax.train.step import Batch, Metrics, TrainStep

HostMetrics = dict[str, np.ndarray]


class MetricCallback(NamedTuple):
    """Called with (steps done, metrics of that step) every `every` steps, one step late."""

    every: int
    call: Callable[[int, HostMetrics], None]


class StateCallback(NamedTuple):
    """Called with (steps done, state) every `every` steps, where `is_due(steps done)`, and when
    training ends or is stopped, only once the step is known to be finite."""

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
    placement: Callable[[dict[str, np.ndarray]], Batch] = jax.device_put,
    on_metrics: Sequence[MetricCallback] = (),
    on_state: Sequence[StateCallback] = (),
    is_stopping: Callable[[int], bool] = lambda step: False,
) -> tuple[TrainState, int]:
    """(state, steps done) after steps `start` to `steps`, or earlier if `is_stopping(steps done)`.

    `placement` puts a batch on the devices. Metrics are fetched while the next step runs. Raises
    `NonFiniteError` with the metric and step, before a state callback receives that state.
    """
    done, pending = start, None

    def report(number: int, metrics: Metrics) -> None:
        host = jax.device_get(metrics)
        _check_finite(number, host)
        for callback in on_metrics:
            if number % callback.every == 0 or number == steps:
                callback.call(number, host)

    for step, batch in batches.iterate(start, steps - start):
        placed = placement(batch)
        with jax.transfer_guard("disallow"):
            state, metrics = train_step(state, placed)
        done = step + 1
        if pending is not None:
            report(*pending)
        pending = (done, metrics)
        is_last = done == steps or is_stopping(done)
        due = [x for x in on_state if is_last or done % x.every == 0 or x.is_due(done)]
        if due:
            report(*pending)
            pending = None
            for callback in due:
                callback.call(done, state)
        if is_last:
            break
    if pending is not None:
        report(*pending)
    return state, done


def _check_finite(number: int, metrics: HostMetrics) -> None:
    for name, value in metrics.items():
        if not np.all(np.isfinite(value)):
            raise NonFiniteError(
                f"{name} is {value} at step {number}; the parameters before it were kept and the "
                "checkpoints are untouched: lower the learning rate or eta and start again"
            )
