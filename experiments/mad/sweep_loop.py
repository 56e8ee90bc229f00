"""Trains the runs of a sweep in groups that fit into memory, and evaluates them as they go."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ttcd_kernels import measure

from experiments.mad.sweep import (
    Batch,
    Hyper,
    Problem,
    Programs,
    RecipeConfig,
    RunState,
    programs,
    sweep_mesh,
)
from experiments.mad.tasks.instances import Splits

Host = dict[str, np.ndarray]


class Evaluation(NamedTuple):
    """All active runs after an epoch, for a progress line."""

    epoch: int
    epochs: int
    group: int
    groups: int
    best_accuracy: float  # of the group, macro


class Outcome(NamedTuple):
    """One run. `metrics` are those of the epoch that the recipe selects, None for a run that
    failed: its step and what came before it are told, but it has no score. `curve`: epoch, macro
    accuracy and loss on the test rows, training loss."""

    rate: float
    weight_decay: float
    seed: int
    steps: int
    failed_at: int | None
    epoch: int | None
    metrics: dict[str, Any] | None
    curve: list[dict[str, float]]


def train_runs(
    config: RecipeConfig,
    problem: Problem,
    splits: Splits,
    hyper: Hyper,
    *,
    budget_bytes: int | None = None,
    devices: Sequence[Any] | None = None,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
) -> list[Outcome]:
    """All runs of `hyper`, in its order. `budget_bytes`: what a device has for its part of a group;
    by the compiler's account of all runs together, they are trained in as few groups as fit.
    Devices beyond the number of runs stay idle."""
    devices = (jax.devices() if devices is None else devices)[: len(hyper.rate)]
    return _Trainer(config, problem, splits, devices, budget_bytes).run(hyper, on_evaluation)


def group_size(num_runs: int, num_devices: int, needed: int, budget: int | None) -> int:
    """Runs that are trained together, the same number on each device, at least one. `needed`:
    bytes on a device if all are; groups are as equal as they can be."""
    per_device = -(-num_runs // num_devices)
    if budget is None or needed <= budget:
        return per_device * num_devices
    groups = -(-per_device // max(per_device * budget // needed, 1))
    return -(-per_device // groups) * num_devices


class _Trainer:
    """Rows on the devices, and the functions compiled for one size of a group."""

    def __init__(self, config, problem, splits, devices, budget_bytes) -> None:
        self.config = config
        self.epochs = config.num_epochs(len(splits.train.inputs))
        self.num_devices, self.budget = len(devices), budget_bytes
        mesh = sweep_mesh(devices)
        self.runs = NamedSharding(mesh, PartitionSpec("runs"))
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.train, self.test = (
            jax.device_put(Batch(*rows), self.whole) for rows in (splits.train, splits.test)
        )
        self.programs = programs(config, problem, self.epochs, mesh)

    def run(self, hyper: Hyper, on_evaluation: Callable[[Evaluation], None]) -> list[Outcome]:
        num_runs = len(hyper.rate)
        size, compiled = self._compile(num_runs)
        groups = range(0, num_runs, size)
        outcomes = []
        for group, first in enumerate(groups):
            # The last group is filled up with copies of the last run: one program for all groups.
            index = np.minimum(np.arange(first, first + size), num_runs - 1)
            part = Hyper(*(np.asarray(x)[index] for x in hyper))
            outcomes += self._run_group(compiled, part, group, len(groups), on_evaluation)
        return outcomes[:num_runs]

    def _compile(self, num_runs: int) -> tuple[int, Programs]:
        """The size of a group, and the functions compiled for it."""
        size = group_size(num_runs, self.num_devices, 0, None)
        compiled = self._compiled_for(size)
        needed = measure.needed_bytes(compiled.train)
        fitting = group_size(num_runs, self.num_devices, needed, self.budget)
        return (size, compiled) if fitting == size else (fitting, self._compiled_for(fitting))

    def _compiled_for(self, size: int) -> Programs:
        hyper = self._hyper(Hyper(np.ones(size), np.zeros(size), np.zeros(size)))
        init = self.programs.init.lower(hyper).compile()
        state, epoch = init(hyper), self._epoch(0)
        return Programs(
            init,
            self.programs.train.lower(state, hyper, self.train, epoch, epoch).compile(),
            self.programs.measure.lower(state.params, self.test).compile(),
        )

    def _hyper(self, hyper: Hyper) -> Hyper:
        kinds = Hyper(np.float32, np.float32, np.uint32)
        return Hyper(*(self._split(x, kind) for x, kind in zip(hyper, kinds, strict=True)))

    def _split(self, x: Any, dtype: Any) -> jax.Array:
        return jax.device_put(np.asarray(x, dtype), self.runs)

    def _epoch(self, epoch: int) -> jax.Array:
        return jax.device_put(np.int32(epoch), self.whole)

    def _run_group(
        self, compiled: Programs, part: Hyper, group: int, groups: int, on_evaluation
    ) -> list[Outcome]:
        hyper = self._hyper(part)
        state: RunState = compiled.init(hyper)
        history: list[tuple[int, Host]] = []
        every = self.config.epochs_per_evaluation(self.epochs)
        for first in range(0, self.epochs, every):
            stop = min(first + every, self.epochs)
            was_active = np.asarray(state.is_active)
            state = compiled.train(state, hyper, self.train, self._epoch(first), self._epoch(stop))
            found = jax.device_get(compiled.measure(state.params, self.test))
            found |= {"training_loss": np.asarray(state.loss), "was_active": was_active}
            history.append((stop, found))
            best = float(found["macro_accuracy"].max())
            on_evaluation(Evaluation(stop, self.epochs, group, groups, best))
            state = self._without_the_done(state, found)
            if not np.asarray(state.is_active).any():
                break
        facts = jax.device_get((state.step, state.failed_at))
        return [
            self._outcome(part, history, run, *(int(x[run]) for x in facts))
            for run in range(len(part.rate))
        ]

    def _without_the_done(self, state: RunState, found: Host) -> RunState:
        """Runs above the accuracy that ends a run take no further step."""
        if self.config.stops_at is None:
            return state
        goes_on = np.asarray(state.is_active) & (found["macro_accuracy"] <= self.config.stops_at)
        return state._replace(is_active=self._split(goes_on, bool))

    def _outcome(
        self, part: Hyper, history: list[tuple[int, Host]], run: int, steps: int, failed_at: int
    ) -> Outcome:
        own = [(epoch, found) for epoch, found in history if found["was_active"][run]]
        curve = [
            {
                "epoch": epoch,
                "macro_accuracy": float(found["macro_accuracy"][run]),
                "loss": float(found["loss"][run]),
                "training_loss": _finite(float(found["training_loss"][run])),
            }
            for epoch, found in own
        ]
        chosen = len(own) - 1
        if self.config.selects == "best_test_loss":
            chosen = min(range(len(own)), key=lambda i: curve[i]["loss"])
        has_failed = failed_at >= 0
        metrics = {
            name: x[run].tolist()
            for name, x in own[chosen][1].items()
            if name not in ("training_loss", "was_active")
        }
        return Outcome(
            rate=float(part.rate[run]),
            weight_decay=float(part.weight_decay[run]),
            seed=int(part.seed[run]),
            steps=steps,
            failed_at=failed_at if has_failed else None,
            epoch=None if has_failed else own[chosen][0],
            metrics=None if has_failed else metrics,
            curve=curve,
        )


def _finite(x: float) -> float | None:
    """JSON knows no NaN."""
    return x if np.isfinite(x) else None
