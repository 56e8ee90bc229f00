"""Many small runs as one program: R runs of one model that differ in rate, decay and seed.

The training step of the library (`train.step`) is vmapped over the runs, and the runs are split
among the devices. An epoch is a scan inside the compiled function: one dispatch per step would
dominate the time of a tiny model. Runs never mix. One whose loss or gradient is not finite keeps
its last good parameters and takes no further step; the numbers of the others do not change by a
bit. Runs that do not fit into device memory together are trained in groups.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from ttcd_kernels.measure import needed_bytes

from experiments.studies.mad.records import Measures, Point, RecipeConfig, Run
from experiments.studies.mad.tasks import IGNORE, Rows, Splits
from ttcd_jax.sharding.batch import replicated
from ttcd_jax.train.optimizer import OptimizerConfig, build_optimizer
from ttcd_jax.train.state import TrainState, state_of
from ttcd_jax.train.step import Batch, Metrics, is_finite, step_with

_MIN_RATE = 1e-6
_NUM_EVALUATIONS = 10


class Hyper(NamedTuple):
    """The hyperparameters of the runs, [R] each. The seed sets parameters and row order."""

    rate: Any
    weight_decay: Any
    seed: Any


class Problem(NamedTuple):
    """One run's functions: `init(key)` gives parameters, `loss_sum(params, batch)` the loss summed
    over the scored targets of a batch (`take_rows`), `measure(params, batch)` the `Measures` that
    are averaged over the batches of the test rows."""

    init: Callable[[jax.Array], Any]
    loss_sum: Callable[[Any, Batch], jax.Array]
    measure: Callable[[Any, Batch], Metrics]


class RunState(NamedTuple):
    """One run; stacked over runs outside this file's inner functions."""

    train: TrainState  # its `step` counts the steps taken
    failed_at: Int[Array, ""]  # the first step that was not finite, -1 without one
    loss: Float[Array, ""]  # mean over the last epoch's steps


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
        return RunState(train, failed_at, run.loss), jnp.asarray(metrics["loss"])

    def epoch_of(epoch: jax.Array, run: RunState) -> RunState:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), num_rows)
        new, losses = jax.lax.scan(one_step, run, _batches(config, order))
        loss = jnp.where(run.failed_at < 0, jnp.mean(losses).astype(jnp.float32), run.loss)
        return new._replace(loss=loss)

    return jax.lax.fori_loop(first, stop, epoch_of, run)


def sweep_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh of one axis; each device has its own runs, and none waits for another."""
    return jax.make_mesh((len(devices),), ("runs",), (AxisType.Auto,), devices=devices)


def programs(config: RecipeConfig, problem: Problem, mesh: Mesh) -> tuple[Any, Any, Any]:
    """The jitted functions of R runs, which the number of devices divides: `init(hyper)` gives a
    `RunState`, `train(state, hyper, rows, first, stop)` donates and gives one, after the epochs
    first .. stop - 1, `measure(params, rows)` gives the measures."""
    runs, whole = PartitionSpec("runs"), PartitionSpec()

    def of_all(function: Callable[..., Any], *specs: PartitionSpec, donated: tuple = ()) -> Any:
        every = jax.vmap(function, tuple(0 if spec == runs else None for spec in specs))
        mapped = jax.shard_map(every, mesh=mesh, in_specs=specs, out_specs=runs, check_vma=False)
        shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
        return jax.jit(mapped, in_shardings=shardings, donate_argnums=donated)

    def init(hyper: Hyper) -> RunState:
        params = problem.init(jax.random.key(hyper.seed))
        state = state_of(_optimizer(lambda _: 0.0, 0.0), params)
        return RunState(state, failed_at=state["step"] - 1, loss=jnp.full((), jnp.nan, jnp.float32))

    def measure(params: Any, rows: Rows) -> Metrics:
        indices = _batches(config, jnp.arange(len(rows.inputs)))
        per_batch = jax.lax.map(lambda i: problem.measure(params, take_rows(rows, i)), indices)
        return jax.tree.map(lambda x: x.mean(0), per_batch)

    train = functools.partial(_train, config, problem)
    of_epochs = of_all(train, runs, runs, whole, whole, whole, donated=(0,))
    return of_all(init, runs), of_epochs, of_all(measure, runs, whole)


def train_runs(
    config: RecipeConfig,
    problem: Problem,
    splits: Splits,
    hyper: Hyper,
    *,
    budget_bytes: int | None = None,
    on_evaluation: Callable[[float, float], None] = lambda done, accuracy: None,
) -> list[Run]:
    """All runs of `hyper`, in its order, in as few groups as fit `budget_bytes` of a device, by the
    compiler's account of all runs together. Devices beyond the number of runs stay idle.
    `on_evaluation` is called with the share of the work done and the group's best macro accuracy.
    """
    num_runs, num_epochs = len(hyper.rate), config.num_epochs(len(splits.train.inputs))
    mesh = sweep_mesh(jax.devices()[:num_runs])
    splits = jax.device_put(splits, replicated(mesh))
    init, train, measure = programs(config, problem, mesh)

    def compiled(size: int) -> Any:
        part = _on_device(Hyper(*np.zeros((3, size))))
        return train.lower(jax.eval_shape(init, part), part, splits.train, 0, 0).compile()

    size = group_size(num_runs, mesh.size, 0, None)
    of_group = compiled(size)
    fitting = group_size(num_runs, mesh.size, needed_bytes(of_group), budget_bytes)
    if fitting != size:
        size, of_group = fitting, compiled(fitting)
    # The last group is filled up with copies of the last run: one program for all groups.
    padded = np.minimum(np.arange(-(-num_runs // size) * size), num_runs - 1)
    groups, finished = padded.reshape(-1, size), []
    for number, group in enumerate(groups):
        part, runs = Hyper(*(np.asarray(x)[group] for x in hyper)), []
        for done, runs in _train_group(init, of_group, measure, splits, part, num_epochs):
            best = max(run.curve[-1].macro_accuracy for run in runs)
            on_evaluation((number + done) / len(groups), best)
        finished += runs
    return finished[:num_runs]


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


def _train_group(
    init: Any, train: Any, measure: Any, splits: Splits, part: Hyper, num_epochs: int
) -> Iterator[tuple[float, list[Run]]]:
    """Trains the runs of `part`; gives the share of epochs that is done, and the runs evaluated,
    every few epochs and after the last one."""
    hyper, every = _on_device(part), -(-num_epochs // _NUM_EVALUATIONS)
    own = zip(*(x.tolist() for x in part), strict=True)
    named = (dict(zip(part._fields, values, strict=True)) for values in own)
    runs = [Run(**values, failed_at=None, metrics=None, curve=()) for values in named]
    state = init(hyper)
    for first in range(0, num_epochs, every):
        epoch = min(first + every, num_epochs)
        state = train(state, hyper, splits.train, first, epoch)
        measured = measure(state.train["params"], splits.test)
        found = jax.device_get((measured, state.loss, state.failed_at))
        runs = [
            _evaluated(run, epoch, *jax.tree.map(lambda x, i=index: x[i].tolist(), found))
            for index, run in enumerate(runs)
        ]
        yield epoch / num_epochs, runs
        if all(run.failed_at is not None for run in runs):
            return


def _evaluated(
    run: Run, epoch: int, measures: dict[str, Any], training_loss: float, failed_at: int
) -> Run:
    """The run with an evaluation; unchanged if it had failed before."""
    if run.failed_at is not None:
        return run
    loss, accuracy = measures["loss"], measures["macro_accuracy"]
    losses = {"loss": _finite(loss), "training_loss": _finite(training_loss)}
    curve = (*run.curve, Point(epoch=epoch, macro_accuracy=accuracy, **losses))
    if failed_at >= 0:
        return run.replace(failed_at=failed_at, metrics=None, curve=curve)
    finite = {name: x for name, x in measures.items() if np.isfinite(x).all()}
    return run.replace(metrics=Measures(**finite), curve=curve)


def _finite(x: float) -> float | None:
    return x if np.isfinite(x) else None
