"""Many small runs as one program: R runs of one model that differ in rate, decay and seed.

The training step of the library (`train.step`) is vmapped over the runs, and the runs are split
among the devices. An epoch is a scan inside the compiled function, over rows that stay on the
device: one dispatch per step would dominate the time of a tiny model.

Runs never mix. One whose loss or gradient is not finite keeps its last good parameters, takes no
further step, and reports it in `failed_at`; the numbers of the others do not change by a bit.
Runs that do not fit into device memory together are trained in groups, one after another.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from ttcd_kernels import measure

from experiments.studies.mad.tasks.instances import Splits
from experiments.studies.mad.tasks.rows import IGNORE, Rows
from ttcd_jax.config import Config, Positive
from ttcd_jax.sharding.batch import replicated
from ttcd_jax.train.optimizer import OptimizerConfig, build_optimizer
from ttcd_jax.train.state import TrainState, state_of
from ttcd_jax.train.step import Batch, Metrics, is_finite, step_with

Params = Any
# A run as it is recorded: rate, weight_decay, seed; `failed_at`, the first step that was not
# finite, or None; `metrics` after the last epoch, None if it failed; `curve`: epoch, macro_accuracy
# and loss on the test rows, and training_loss of every evaluation up to the failure. A loss there
# is None where it is not finite: JSON has no NaN.
Outcome = dict[str, Any]

_MIN_RATE = 1e-6
_NUM_EVALUATIONS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    """AdamW (beta 0.9 and 0.999, eps 1e-8) without a clip or warm-up, decay on every tensor, the
    rate constant within an epoch: 1e-6 + (rate - 1e-6) (1 + cos(pi epoch / epochs)) / 2.

    `max_steps` limits the run to the fewest epochs with so many steps. The published code differs,
    mostly by accident: its cosine is never applied (`schedule="constant"`), its score is that of
    the epoch with the lowest loss on the *test* rows, not of the last one, and a run ends as soon
    as its test accuracy is above 0.999.
    """

    epochs: Positive = 200
    max_steps: Positive | None = None
    batch_size: Positive = 128
    schedule: Literal["cosine", "constant"] = "cosine"

    def steps_per_epoch(self, num_train: int) -> int:
        """The number of batches of an epoch, the last of which may be partial."""
        return -(-num_train // self.batch_size)

    def num_epochs(self, num_train: int) -> int:
        if self.max_steps is None:
            return self.epochs
        return min(self.epochs, -(-self.max_steps // self.steps_per_epoch(num_train)))


class Hyper(NamedTuple):
    """The hyperparameters of the runs, [R] each. The seed sets parameters and row order."""

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
    return _MIN_RATE + (rate - _MIN_RATE) * fall


def take_rows(rows: Rows, index: Int[Array, " B"]) -> Batch:
    """The batch of these rows; an index after the last row gives a row that is not scored."""
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
    return build_optimizer(adamw, schedule, {}, weight_decay)


def _init(problem: Problem, hyper: Hyper) -> RunState:
    params = problem.init(jax.random.key(hyper.seed))
    state = state_of(_optimizer(lambda _: 0.0, 0.0), params)
    return RunState(state, failed_at=state["step"] - 1, loss=jnp.full((), jnp.nan, jnp.float32))


def _train(
    config: RecipeConfig,
    problem: Problem,
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
        return rate_of_epoch(config, hyper.rate, epoch, config.num_epochs(num_rows))

    gradients = jax.value_and_grad(
        lambda params, batch, _: (problem.loss_sum(params, batch), {}), has_aux=True
    )
    step = step_with(gradients, _optimizer(rate, hyper.weight_decay), rate)

    def one_step(run: RunState, index: jax.Array) -> tuple[RunState, jax.Array]:
        """One step of a run; from a step that fails on, nothing of the run changes."""
        new, metrics = step(run.train, take_rows(rows, index))
        is_active, is_good = run.failed_at < 0, is_finite(metrics)
        train = jax.tree.map(functools.partial(jnp.where, is_active & is_good), new, run.train)
        failed_at = jnp.where(is_active & ~is_good, run.train["step"], run.failed_at)
        return RunState(train, failed_at, run.loss), metrics["loss"]

    def epoch_of(epoch: jax.Array, run: RunState) -> RunState:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), num_rows)
        new, losses = jax.lax.scan(one_step, run, _batches(config, order))
        loss = jnp.where(run.failed_at < 0, jnp.mean(losses).astype(jnp.float32), run.loss)
        return new._replace(loss=loss)

    return jax.lax.fori_loop(first, stop, epoch_of, run)


def _measure(config: RecipeConfig, problem: Problem, params: Params, rows: Rows) -> Metrics:
    indices = _batches(config, jnp.arange(len(rows.inputs)))
    per_batch = jax.lax.map(lambda i: problem.measure(params, take_rows(rows, i)), indices)
    return jax.tree.map(lambda x: x.mean(0), per_batch)


def sweep_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh of one axis; each device has its own runs, and none waits for another."""
    return jax.make_mesh((len(devices),), ("runs",), (AxisType.Auto,), devices=devices)


def programs(config: RecipeConfig, problem: Problem, mesh: Mesh) -> Programs:
    """The functions for runs stacked on the leading axis; the number of devices divides theirs.
    They take host and device arrays; `train` donates its state."""
    runs, whole = PartitionSpec("runs"), PartitionSpec()

    def of_all(function: Callable[..., Any], *specs: PartitionSpec, donated: tuple = ()) -> Any:
        every = jax.vmap(function, tuple(0 if spec == runs else None for spec in specs))
        mapped = jax.shard_map(every, mesh=mesh, in_specs=specs, out_specs=runs, check_vma=False)
        shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
        return jax.jit(mapped, in_shardings=shardings, donate_argnums=donated)

    train = functools.partial(_train, config, problem)
    return Programs(
        of_all(functools.partial(_init, problem), runs),
        of_all(train, runs, runs, whole, whole, whole, donated=(0,)),
        of_all(functools.partial(_measure, config, problem), runs, whole),
    )


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
    `on_evaluation` is called with the share of the work done and the group's best macro accuracy.
    """
    num_runs = len(hyper.rate)
    mesh = sweep_mesh(jax.devices()[:num_runs])
    splits = jax.device_put(splits, replicated(mesh))
    jitted = programs(config, problem, mesh)
    size = group_size(num_runs, mesh.size, 0, None)
    compiled = _compiled(jitted, size, splits.train)
    needed = measure.needed_bytes(compiled.train)
    if (fitting := group_size(num_runs, mesh.size, needed, budget_bytes)) != size:
        size, compiled = fitting, _compiled(jitted, fitting, splits.train)
    # The last group is filled up with copies of the last run: one program for all groups.
    num_groups, outcomes = -(-num_runs // size), []
    groups = np.minimum(np.arange(num_groups * size), num_runs - 1).reshape(num_groups, size)
    for number, group in enumerate(groups):
        outcomes += _train_group(
            compiled,
            splits,
            Hyper(*(np.asarray(x)[group] for x in hyper)),
            config.num_epochs(len(splits.train.inputs)),
            lambda done, best, first=number: on_evaluation((first + done) / num_groups, best),
        )
    return outcomes[:num_runs]


def group_size(num_runs: int, num_devices: int, needed: int, budget: int | None) -> int:
    """Runs that are trained together, the same number on each device, at least one. `needed`:
    bytes on a device if all are; groups are as equal as possible."""
    per_device = -(-num_runs // num_devices)
    if budget is None or needed <= budget:
        return per_device * num_devices
    groups = -(-per_device // max(per_device * budget // needed, 1))
    return -(-per_device // groups) * num_devices


def _on_device(hyper: Hyper) -> Hyper:
    return Hyper(*map(np.asarray, hyper, Hyper(np.float32, np.float32, np.uint32)))


def _compiled(jitted: Programs, size: int, rows: Rows) -> Programs:
    """The programs, with the training of `size` runs compiled."""
    hyper = _on_device(Hyper(*np.zeros((3, size))))
    state = jax.eval_shape(jitted.init, hyper)
    return jitted._replace(train=jitted.train.lower(state, hyper, rows, 0, 0).compile())


def _train_group(
    compiled: Programs,
    splits: Splits,
    part: Hyper,
    num_epochs: int,
    on_evaluation: Callable[[float, float], None],
) -> list[Outcome]:
    """Outcomes of the runs of `part`, evaluated every few epochs and after the last one."""
    hyper, every = _on_device(part), -(-num_epochs // _NUM_EVALUATIONS)
    state = compiled.init(hyper)
    outcomes: list[Outcome] = [
        {name: x[run].item() for name, x in part._asdict().items()}
        | {"failed_at": None, "metrics": None, "curve": []}
        for run in range(len(part.rate))
    ]
    for first in range(0, num_epochs, every):
        epoch = min(first + every, num_epochs)
        state = compiled.train(state, hyper, splits.train, first, epoch)
        measured = compiled.measure(state.train["params"], splits.test)
        metrics, losses, ends = jax.device_get((measured, state.loss, state.failed_at))
        for run, outcome in enumerate(outcomes):
            if outcome["failed_at"] is None:
                values = {name: x[run].tolist() for name, x in metrics.items()}
                point = {"epoch": epoch, "macro_accuracy": values["macro_accuracy"]}
                point |= {"loss": _finite(values["loss"]), "training_loss": _finite(losses[run])}
                outcome["curve"].append(point)
                has_failed = ends[run] >= 0
                outcome["failed_at"] = int(ends[run]) if has_failed else None
                outcome["metrics"] = None if has_failed else values
        on_evaluation(epoch / num_epochs, float(metrics["macro_accuracy"].max()))
        if (ends >= 0).all():
            break
    return outcomes


def _finite(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None
