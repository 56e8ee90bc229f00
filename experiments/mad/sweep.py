"""Many small runs as one program: R runs of one model that differ in rate, decay and seed.

The training step of the library (`train.step`) is vmapped over the runs, and the runs are split
among the devices. An epoch is a scan inside the compiled function, over rows that stay on the
device: one dispatch per step would dominate the time of a tiny model.

Runs never mix. One whose loss or gradient is not finite keeps its last good parameters, takes no
further step, and reports it in `failed_at`; the numbers of the others do not change by a bit.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from experiments.mad.tasks.rows import IGNORE, Rows
from ttcd_jax.config import Config, NonNegativeFloat, Positive
from ttcd_jax.train.optimizer import OptimizerConfig, build_with_schedule
from ttcd_jax.train.state import TrainState, state_of
from ttcd_jax.train.step import Batch, Metrics, is_finite, step_with

Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    """AdamW (beta 0.9 and 0.999, eps 1e-8) without a clip or warm-up, decay on every tensor, the
    rate constant within an epoch: min_rate + (rate - min_rate) (1 + cos(pi epoch / epochs)) / 2.

    `max_steps` shortens the run to the epochs that hold so many steps. Options for the published
    code's behaviour, most of it accidental: `schedule="constant"` (its cosine is never applied),
    `selects="best_test_loss"` (the score is that of the epoch with the lowest loss on the *test*
    rows), `stops_at` (a run ends as soon as its test accuracy is higher; published: 0.999).
    """

    epochs: Positive = 200
    max_steps: Positive | None = None
    batch_size: Positive = 128
    min_rate: NonNegativeFloat = 1e-6
    num_evaluations: Positive = 10  # at the ends of equally many epochs, and of the last one
    schedule: Literal["cosine", "constant"] = "cosine"
    selects: Literal["last", "best_test_loss"] = "last"
    stops_at: float | None = None

    def steps_per_epoch(self, num_train: int) -> int:
        """The last batch of an epoch may be a part of one."""
        return -(-num_train // self.batch_size)

    def num_epochs(self, num_train: int) -> int:
        if self.max_steps is None:
            return self.epochs
        return min(self.epochs, -(-self.max_steps // self.steps_per_epoch(num_train)))

    def epochs_per_evaluation(self, num_epochs: int) -> int:
        """The published options look at every epoch."""
        looks_often = self.selects == "best_test_loss" or self.stops_at is not None
        return 1 if looks_often else -(-num_epochs // self.num_evaluations)


class Hyper(NamedTuple):
    """The hyperparameters of the runs, [R] each. The seed gives parameters and order of rows."""

    rate: Any
    weight_decay: Any
    seed: Any


class Problem(NamedTuple):
    """One run's functions: `init(key)` gives parameters, `loss_sum(params, batch)` the loss summed
    over the scored targets of a batch (`take_rows`), `measure(params, batch)` the measures that are
    averaged over the batches of the test rows; among them `loss` and `macro_accuracy`."""

    init: Callable[[jax.Array], Params]
    loss_sum: Callable[[Params, Batch], jax.Array]
    measure: Callable[[Params, Batch], Metrics]


class RunState(NamedTuple):
    """One run; stacked over runs outside this file's inner functions."""

    train: TrainState  # its `step` counts the steps taken
    is_active: Bool[Array, ""]
    failed_at: Int[Array, ""]  # the first step that was not finite, -1 without one
    loss: Float[Array, ""]  # mean over the last epoch's steps


class Programs(NamedTuple):
    """The functions of R runs, jitted or compiled: `init(hyper) -> RunState`,
    `train(state, hyper, rows, first, stop) -> RunState` for epochs first .. stop - 1,
    `measure(params, rows) -> Metrics`."""

    init: Any
    train: Any
    measure: Any


def rate_of_epoch(
    config: RecipeConfig, rate: jax.Array, epoch: jax.typing.ArrayLike, epochs: int
) -> jax.Array:
    """The learning rate of a run in epoch 0, 1, ... of `epochs`."""
    if config.schedule == "constant":
        return rate
    fall = (1 + jnp.cos(jnp.pi * jnp.asarray(epoch, float) / epochs)) / 2
    return config.min_rate + (rate - config.min_rate) * fall


def take_rows(rows: Rows, index: Int[Array, " B"]) -> Batch:
    """The batch of these rows; an index after the last row gives one that is not scored."""
    tokens, targets = (jnp.take(x, index, axis=0, mode="clip") for x in rows)
    targets = jnp.where((index < len(rows.inputs))[:, None], targets, IGNORE)
    return {"tokens": tokens, "targets": targets, "loss_mask": targets != IGNORE}


def _batches(config: RecipeConfig, order: jax.Array) -> jax.Array:
    """Indices [steps, B]; the last batch is filled up with the index after the last row."""
    count, steps = len(order), config.steps_per_epoch(len(order))
    filled = jnp.pad(order, (0, steps * config.batch_size - count), constant_values=count)
    return filled.reshape(steps, config.batch_size)


def _optimizer(schedule: optax.Schedule, weight_decay: Any) -> optax.GradientTransformation:
    adamw = OptimizerConfig(beta2=0.999, clip_norm=None)
    return build_with_schedule(adamw, schedule, {}, weight_decay)


def _init(problem: Problem, hyper: Hyper) -> RunState:
    params = problem.init(jax.random.key(hyper.seed))
    state = state_of(_optimizer(lambda _: 0.0, 0.0), params)
    return RunState(state, jnp.array(True), state["step"] - 1, jnp.full((), jnp.nan, jnp.float32))


def _train(
    config: RecipeConfig,
    problem: Problem,
    epochs: int,
    run: RunState,
    hyper: Hyper,
    rows: Rows,
    first: jax.Array,
    stop: jax.Array,
) -> RunState:
    """Epochs first .. stop - 1 of one run, each over all rows in a new order."""
    key = jax.random.fold_in(jax.random.key(hyper.seed), 1)
    num_rows = len(rows.inputs)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        epoch = jnp.asarray(step) // config.steps_per_epoch(num_rows)
        return rate_of_epoch(config, hyper.rate, epoch, epochs)

    gradients = jax.value_and_grad(
        lambda params, batch: (problem.loss_sum(params, batch), None), has_aux=True
    )
    step = step_with(gradients, _optimizer(rate, hyper.weight_decay), rate)

    def one_step(run: RunState, index: jax.Array) -> tuple[RunState, jax.Array]:
        """Nothing of an inactive run changes, nor in a step that fails."""
        new, metrics = step(run.train, take_rows(rows, index))
        is_taken = run.is_active & is_finite(metrics)
        train = jax.tree.map(functools.partial(jnp.where, is_taken), new, run.train)
        failed_at = jnp.where(run.is_active & ~is_taken, run.train["step"], run.failed_at)
        return RunState(train, is_taken, failed_at, run.loss), metrics["loss"]

    def epoch_of(epoch: jax.Array, run: RunState) -> RunState:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), num_rows)
        new, losses = jax.lax.scan(one_step, run, _batches(config, order))
        loss = jnp.where(run.is_active, jnp.mean(losses).astype(jnp.float32), run.loss)
        return new._replace(loss=loss)

    return jax.lax.fori_loop(first, stop, epoch_of, run)


def _measure(config: RecipeConfig, problem: Problem, params: Params, rows: Rows) -> Metrics:
    indices = _batches(config, jnp.arange(len(rows.inputs)))
    per_batch = jax.lax.map(lambda i: problem.measure(params, take_rows(rows, i)), indices)
    return jax.tree.map(lambda x: x.mean(0), per_batch)


def sweep_mesh(devices: Sequence[Any]) -> Mesh:
    """All devices in a line; each has its own runs, and none waits for another."""
    return jax.make_mesh((len(devices),), ("runs",), (AxisType.Auto,), devices=devices)


def programs(config: RecipeConfig, problem: Problem, epochs: int, mesh: Mesh) -> Programs:
    """The functions for runs stacked on the leading axis, whose number the devices divide. They
    take arrays of the host and of the devices; `train` consumes its state."""
    runs, whole = PartitionSpec("runs"), PartitionSpec()

    def of_all(function: Callable[..., Any], *specs: PartitionSpec, donated: tuple = ()) -> Any:
        every = jax.vmap(function, tuple(0 if spec == runs else None for spec in specs))
        mapped = jax.shard_map(every, mesh=mesh, in_specs=specs, out_specs=runs, check_vma=False)
        shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
        return jax.jit(mapped, in_shardings=shardings, donate_argnums=donated)

    train = functools.partial(_train, config, problem, epochs)
    return Programs(
        of_all(functools.partial(_init, problem), runs),
        of_all(train, runs, runs, whole, whole, whole, donated=(0,)),
        of_all(functools.partial(_measure, config, problem), runs, whole),
    )
