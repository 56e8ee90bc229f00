"""Many small runs as one program: R runs of one model that differ in rate, decay and seed.

The runs are stacked on a leading axis and vmapped, over all devices where there are several. An
epoch is a scan inside the compiled function over rows that stay on the device, so that a tiny model
is not bound by one dispatch per step.

Runs never mix. One whose loss or gradient stops being finite keeps its last good parameters, takes
no further step, and is told by `failed_at`; the numbers of the others do not change by a bit.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from experiments.mad.tasks.rows import IGNORE
from ttcd_jax.config import Config, Decay, NonNegativeFloat, Positive, PositiveFloat
from ttcd_jax.train.optimizer import global_norm

Params = Any
Metrics = dict[str, jax.Array]
_RUNS = PartitionSpec("runs")
_WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    """AdamW without a clip or warm-up, decay on every tensor, the rate constant within an epoch:
    min_rate + (rate - min_rate) (1 + cos(pi epoch / epochs)) / 2.

    `max_steps` shortens the run to the epochs that hold so many steps. What the published code
    does, most of it by accident, are options: `schedule="constant"` (its cosine is never applied),
    `selects="best_test_loss"` (the score is that of the epoch with the lowest loss on the *test*
    rows), `stops_at` (a run ends as soon as its test accuracy is higher; published: 0.999).
    """

    epochs: Positive = 200
    max_steps: Positive | None = None
    batch_size: Positive = 128
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: PositiveFloat = 1e-8
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


class Batch(NamedTuple):
    """Rows on the device."""

    inputs: Int[Array, "N T"]
    targets: Int[Array, "N T"]


class Hyper(NamedTuple):
    """What the runs differ in, [R] each. The seed gives parameters and order of rows."""

    rate: Any
    weight_decay: Any
    seed: Any


class Problem(NamedTuple):
    """One run's functions: `init(key)` gives parameters, `loss(params, rows)` a mean over scored
    targets, `measure(params, rows)` what is averaged over the batches of the test rows; among it
    `loss` and `macro_accuracy`."""

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch], jax.Array]
    measure: Callable[[Params, Batch], Metrics]


class RunState(NamedTuple):
    """One run; stacked over runs outside this file's inner functions."""

    params: Params
    opt_state: Any
    is_active: Bool[Array, ""]
    step: Int[Array, ""]  # steps taken
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


def _optimizer(config: RecipeConfig, rate: Any, weight_decay: Any) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        optax.add_decayed_weights(weight_decay),
        optax.scale(-rate),
    )


def take_rows(rows: Batch, index: Int[Array, " B"]) -> Batch:
    """The rows of a batch; what lies behind the last one is there, but not scored."""
    inputs, targets = (jnp.take(x, index, axis=0, mode="clip") for x in rows)
    is_real = (index < len(rows.inputs))[:, None]
    return Batch(inputs, jnp.where(is_real, targets, IGNORE))


def _batches(config: RecipeConfig, order: jax.Array) -> jax.Array:
    """Indices [steps, B]; the last batch is filled up with the index behind the last row."""
    count = len(order)
    steps = config.steps_per_epoch(count)
    filled = jnp.pad(order, (0, steps * config.batch_size - count), constant_values=count)
    return filled.reshape(steps, config.batch_size)


def _init(config: RecipeConfig, problem: Problem, hyper: Hyper) -> RunState:
    params = problem.init(jax.random.key(hyper.seed))
    opt_state = _optimizer(config, 0.0, 0.0).init(params)
    zero = jnp.zeros((), jnp.int32)
    loss = jnp.full((), jnp.nan, jnp.float32)
    return RunState(params, opt_state, jnp.array(True), zero, zero - 1, loss)


def _step(
    config: RecipeConfig, problem: Problem, state: RunState, rate, weight_decay, rows: Batch
) -> tuple[RunState, jax.Array]:
    """One step; nothing of a run changes that is inactive, or whose step is not finite."""
    loss, grads = jax.value_and_grad(problem.loss)(state.params, rows)
    optimizer = _optimizer(config, rate, weight_decay)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(global_norm(grads))
    is_taken = state.is_active & is_finite
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_taken, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    failed_at = jnp.where(state.is_active & ~is_finite, state.step, state.failed_at)
    step = state.step + is_taken
    return RunState(params, opt_state, is_taken, step, failed_at, state.loss), loss


def _train(
    config: RecipeConfig,
    problem: Problem,
    epochs: int,
    state: RunState,
    hyper: Hyper,
    rows: Batch,
    epochs_range: tuple[jax.Array, jax.Array],
) -> RunState:
    """Epochs first .. stop - 1 of one run, each over all rows in an order of its own."""
    key = jax.random.fold_in(jax.random.key(hyper.seed), 1)

    def epoch_of(epoch, state: RunState) -> RunState:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), len(rows.inputs))
        rate = rate_of_epoch(config, hyper.rate, epoch, epochs)

        def body(state, index):
            batch = take_rows(rows, index)
            return _step(config, problem, state, rate, hyper.weight_decay, batch)

        was_active = state.is_active
        state, losses = jax.lax.scan(body, state, _batches(config, order))
        loss = jnp.where(was_active, jnp.mean(losses).astype(jnp.float32), state.loss)
        return state._replace(loss=loss)

    return jax.lax.fori_loop(*epochs_range, epoch_of, state)


def _measure(config: RecipeConfig, problem: Problem, params: Params, rows: Batch) -> Metrics:
    def body(_, index):
        return None, problem.measure(params, take_rows(rows, index))

    _, metrics = jax.lax.scan(body, None, _batches(config, jnp.arange(len(rows.inputs))))
    return jax.tree.map(lambda x: x.mean(0), metrics)


def sweep_mesh(devices: Sequence[Any]) -> Mesh:
    """All devices in a line; each has runs of its own, and none waits for another."""
    return jax.make_mesh((len(devices),), ("runs",), (AxisType.Auto,), devices=devices)


def programs(config: RecipeConfig, problem: Problem, epochs: int, mesh: Mesh) -> Programs:
    """The functions for runs stacked on the leading axis, whose number the devices divide. `train`
    takes over the memory of the state it is given."""

    def init(hyper):
        return jax.vmap(lambda hyper: _init(config, problem, hyper))(hyper)

    def train(state, hyper, rows, first, stop):
        def run(state, hyper):
            return _train(config, problem, epochs, state, hyper, rows, (first, stop))

        return jax.vmap(run)(state, hyper)

    def measure(params, rows):
        return jax.vmap(lambda params: _measure(config, problem, params, rows))(params)

    def on_devices(function, *in_specs, donated=()):
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=_RUNS, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donated)

    return Programs(
        on_devices(init, _RUNS),
        on_devices(train, _RUNS, _RUNS, _WHOLE, _WHOLE, _WHOLE, donated=0),
        on_devices(measure, _RUNS, _WHOLE),
    )
