"""Trains the runs of a sweep in groups that fit into memory, and evaluates them as they go."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from ttcd_kernels import measure

from experiments.mad.sweep import Hyper, Problem, Programs, RecipeConfig, programs, sweep_mesh
from experiments.mad.tasks.instances import Splits
from ttcd_jax.sharding.batch import replicated


class Outcome(NamedTuple):
    """One run. `metrics` are those of the epoch that the recipe selects, None for a run that
    failed, which has a curve until then. `curve`: epoch, macro accuracy and loss on the test rows,
    training loss (None where not finite: JSON has no NaN)."""

    rate: float
    weight_decay: float
    seed: int
    steps: int
    failed_at: int | None
    epoch: int | None
    metrics: dict[str, Any] | None
    curve: list[dict[str, float | None]]


def train_runs(
    config: RecipeConfig,
    problem: Problem,
    splits: Splits,
    hyper: Hyper,
    *,
    budget_bytes: int | None = None,
    on_evaluation: Callable[[float, float], None] = lambda done, accuracy: None,
) -> list[Outcome]:
    """All runs of `hyper`, in its order, in as few groups as fit `budget_bytes` of a device, by the
    compiler's account of all runs together. Devices beyond the number of runs stay idle.
    `on_evaluation` gets the share of the work done and the best macro accuracy of the group."""
    num_runs = len(hyper.rate)
    mesh = sweep_mesh(jax.devices()[:num_runs])
    splits = jax.device_put(splits, replicated(mesh))
    jitted = programs(config, problem, config.num_epochs(len(splits.train.inputs)), mesh)
    size = group_size(num_runs, mesh.size, 0, None)
    compiled = _compiled(jitted, size, splits)
    needed = measure.needed_bytes(compiled.train)
    fitting = group_size(num_runs, mesh.size, needed, budget_bytes)
    if fitting != size:
        size, compiled = fitting, _compiled(jitted, fitting, splits)
    outcomes = []
    for first in range(0, num_runs, size):

        def report(done: float, accuracy: float, first: int = first) -> None:
            on_evaluation(min((first + done * size) / num_runs, 1.0), accuracy)

        # The last group is filled up with copies of the last run: one program for all groups.
        index = np.minimum(np.arange(first, first + size), num_runs - 1)
        part = Hyper(*(np.asarray(x)[index] for x in hyper))
        outcomes += _train_group(config, compiled, splits, part, report)
    return outcomes[:num_runs]


def group_size(num_runs: int, num_devices: int, needed: int, budget: int | None) -> int:
    """Runs that are trained together, the same number on each device, at least one. `needed`:
    bytes on a device if all are; groups are as equal as they can be."""
    per_device = -(-num_runs // num_devices)
    if budget is None or needed <= budget:
        return per_device * num_devices
    groups = -(-per_device // max(per_device * budget // needed, 1))
    return -(-per_device // groups) * num_devices


def _on_device(hyper: Hyper) -> Hyper:
    return Hyper(*map(np.asarray, hyper, Hyper(np.float32, np.float32, np.uint32)))


def _compiled(jitted: Programs, size: int, splits: Splits) -> Programs:
    hyper = _on_device(Hyper(*np.zeros((3, size))))
    state = jax.eval_shape(jitted.init, hyper)
    return jitted._replace(train=jitted.train.lower(state, hyper, splits.train, 0, 0).compile())


def _train_group(
    config: RecipeConfig,
    compiled: Programs,
    splits: Splits,
    part: Hyper,
    report: Callable[[float, float], None],
) -> list[Outcome]:
    hyper, epochs = _on_device(part), config.num_epochs(len(splits.train.inputs))
    state, every = compiled.init(hyper), config.epochs_per_evaluation(epochs)
    is_active, points = np.ones(len(part.rate), bool), [[] for _ in part.rate]
    for first in range(0, epochs, every):
        stop = min(first + every, epochs)
        state = compiled.train(state, hyper, splits.train, first, stop)
        measured = compiled.measure(state.train["params"], splits.test)
        losses, metrics = jax.device_get((state.loss, measured))
        for run in np.flatnonzero(is_active):
            own = {name: x[run].tolist() for name, x in metrics.items()}
            point = {"epoch": stop, "macro_accuracy": own["macro_accuracy"], "loss": own["loss"]}
            point["training_loss"] = float(losses[run]) if np.isfinite(losses[run]) else None
            points[run].append((point, own))
        report(stop / epochs, float(metrics["macro_accuracy"].max()))
        is_active = np.asarray(state.is_active)
        if config.stops_at is not None:
            is_active = is_active & (metrics["macro_accuracy"] <= config.stops_at)
            state = state._replace(is_active=is_active)
        if not is_active.any():
            break
    ends = jax.device_get((state.train["step"], state.failed_at))
    return [_outcome(config, *run) for run in zip(*part, points, *ends, strict=True)]


def _outcome(
    config: RecipeConfig,
    rate: float,
    weight_decay: float,
    seed: int,
    points: list[tuple[dict[str, Any], dict[str, Any]]],
    steps: int,
    failed_at: int,
) -> Outcome:
    """Of a run with these points, a pair of curve and metrics each."""
    chosen, metrics = points[-1]
    if config.selects == "best_test_loss":
        chosen, metrics = min(points, key=lambda point: point[0]["loss"])
    has_failed = failed_at >= 0
    return Outcome(
        rate=float(rate),
        weight_decay=float(weight_decay),
        seed=int(seed),
        steps=int(steps),
        failed_at=int(failed_at) if has_failed else None,
        epoch=None if has_failed else chosen["epoch"],
        metrics=None if has_failed else metrics,
        curve=[point for point, _ in points],
    )
