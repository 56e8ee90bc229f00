"""MAD sweeps, root of the files in configs/mad/: the models of the tasks, two small blocks of any
method, and their training: R runs that differ in rate, decay and seed are one program, whose
results are a record.

Next-token tasks take a `Transformer` with an untied head. Compression takes an `Autoencoder`: the
row is decoded from the hidden state of its last token alone.

The training step of the library (`train.step`) is vmapped over the runs, and the runs are split
among the devices. An epoch is a scan inside the compiled function: one dispatch per step would
dominate the time of a tiny model. Runs never mix. One whose loss or gradient is not finite keeps
its last good parameters and takes no further step; those of others do not change by a bit.
Runs that do not fit into device memory together are trained in groups.
"""

import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from ttcd_kernels import measure

from experiments.studies.mad import records, tasks
from experiments.studies.mad.records import Job, MADMethod, Measures, Point, RecipeConfig, Run
from experiments.studies.mad.tasks import IGNORE, TASKS, MADConfig, Rows, TaskName
from ttcd_jax import MemoryConfig, Precision, Transformer
from ttcd_jax.axes import param
from ttcd_jax.config import DISTINCT, Bound, Config, NonNegativeFloat, Positive, PositiveFloat
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.lact import LaCTMemoryConfig
from ttcd_jax.models.config import TransformerConfig, switched_off
from ttcd_jax.nn.linear import linear, normal_param, rms_norm
from ttcd_jax.sharding.rules import replicated
from ttcd_jax.terminal import Progress
from ttcd_jax.train.optimizer import OptimizerConfig, build_optimizer
from ttcd_jax.train.state import TrainState, state_of
from ttcd_jax.train.step import Batch, Metrics, is_finite, step_with

# Fields that choose the jobs and change no result: records of one directory may differ in them.
SELECTION = ("tasks", "settings", "methods")
DATA_SEED = 12345  # the seed of the published rows
_Seed = Annotated[int, Bound("in 0 .. 2^32 - 1", lambda value: 0 <= value < 2**32)]
_MIN_RATE = 1e-6
_NUM_EVALUATIONS = 10


class MADSweepConfig(Config):
    """A sweep: every setting of `tasks` is trained with every method, and with all combinations of
    `rates`, `weight_decays` and `seeds` in one compiled program.

    `num_train` lowers the number of training rows. `init_std` is that of all normal
    initialisations; with a larger one recall is learned from far fewer rows
    (experiments/RESULTS.md).
    """

    recipe: RecipeConfig
    precision: Precision
    tasks: Annotated[tuple[TaskName, ...], DISTINCT] = TASKS
    settings: Literal["default", "all"] = "default"
    methods: Annotated[tuple[MADMethod, ...], DISTINCT] = records.MAD_METHODS
    rates: Annotated[tuple[NonNegativeFloat, ...], DISTINCT] = (1e-4, 5e-4, 1e-3)
    weight_decays: Annotated[tuple[NonNegativeFloat, ...], DISTINCT] = (0.0, 0.1)
    seeds: Annotated[tuple[_Seed, ...], DISTINCT] = (12345,)
    num_train: Positive | None = None
    num_test: Positive = 1280
    init_std: PositiveFloat = 0.02


class Hyper(NamedTuple):
    """The hyperparameters of the runs, [R] each; the seed, uint32, is of parameters and order."""

    rate: Any
    weight_decay: Any
    seed: Any


def hyper(config: MADSweepConfig) -> Hyper:
    """The hyperparameters of a job's runs, the same for every job."""
    grid = itertools.product(config.rates, config.weight_decays, config.seeds)
    return Hyper(*map(np.array, zip(*grid, strict=True), (float, float, np.uint32)))


def jobs(config: MADSweepConfig) -> list[Job]:
    """All jobs by setting; the methods of a setting are adjacent, since they share the rows."""
    stop = None if config.settings == "all" else 1
    chosen = [setting for task in config.tasks for setting in tasks.settings(task)[:stop]]
    fields: dict[str, Any] = {"init_std": config.init_std, "precision": config.precision}
    found = []
    for (name, data, num_rows), method in itertools.product(chosen, config.methods):
        num_train = min(num_rows, config.num_train or num_rows)
        epochs = config.recipe.num_epochs(num_train)
        sizes = {"num_train": num_train, "num_test": config.num_test, "epochs": epochs}
        sizes["steps"] = epochs * config.recipe.steps_per_epoch(num_train)
        parts = {"data": data, "recipe": config.recipe, "model": mad_config(method, data, **fields)}
        names = {"task": data.task, "setting": name, "method": method}
        found.append(Job(**names, **sizes, **parts, published_num_train=num_rows))
    return found


def plan(config: MADSweepConfig) -> str:
    """A line per job, and the number of runs."""
    every_job, runs = jobs(config), len(hyper(config).rate)
    lines = [f"{x.name}: {runs} runs of {x.steps:,} steps ({x.epochs} epochs)" for x in every_job]
    num_settings = len(every_job) // len(config.methods)
    total = f"{runs * num_settings} runs per method, {runs * len(every_job)} runs in all"
    return "\n".join([*lines, f"{num_settings} settings, {total}"])


def train_jobs(config: MADSweepConfig, folder: Path) -> None:
    """Trains every job neither recorded in `folder` nor claimed by another process. Prints a line
    per finished job; the time left is that of the tokens left at the speed of all processes."""
    every_job = jobs(config)
    pending = [job for job in every_job if not records.record_path(folder, job).exists()]
    print(f"{folder}: {len(every_job) - len(pending)} of {len(every_job)} recorded", flush=True)
    rows = functools.lru_cache(maxsize=1)(tasks.instances)
    # Steps times positions per row, proportional to tokens: all jobs share the batch size.
    work = [*itertools.accumulate(job.steps * job.data.num_positions for job in pending)]
    progress = Progress(sys.stdout, work[-1] if work else 0, start=0)
    for number, job in enumerate(pending, 1):
        path = records.record_path(folder, job)
        with records.claim(path) as is_ours:
            if not is_ours:
                continue

            def show(text: str, name: str = job.name) -> None:
                if progress.is_live:
                    progress.show(f"{name}: {text}")

            show("compiling")
            start, sizes = time.monotonic(), {"num_train": job.num_train, "num_test": job.num_test}
            train, test = rows(job.data, seed=DATA_SEED, **sizes)
            runs = train_runs(
                *(job.recipe, mad_problem(job.data, job.model), train, test, hyper(config)),
                budget_bytes=measure.usable_bytes(),
                on_evaluation=lambda done, accuracy: show(f"{done:.0%}, accuracy {accuracy:.3f}"),
            )
            found = {"environment": measure.environment(), "runs": tuple(runs)}
            found["seconds"] = round(time.monotonic() - start, 1)
            record = records.Record(**vars(job), **found)
            records.write(path, record)
        line = f"[{number}/{len(pending)}] {job.name}: {records.best_text(record)}"
        left = progress.left(work[number - 1]) if number < len(pending) else ""
        progress.show(f"{line}, {record.seconds:.0f} s{left and f', {left}'}", is_last=True)


def mad_config(
    method: MADMethod, task: MADConfig, *, window: int | None = None, **fields: Any
) -> TransformerConfig:
    """Two layers with four heads, both fast where a method has fast layers, of the published sizes
    unless `fields` change them. The teacher's window is 16 for tasks of 32 tokens, 32 for the
    others, or `window`; the student's (the whole where there is no gap) and the chunk are half.

    Methods are as published for training from scratch, `ipttcd_delta` is that of
    method/ipttcd_delta.gin. The publication of LaCT does not specify its initial state: here
    full matrices, one fast head per attention head, no Muon.
    """
    window = window or (16 if task.task in ("compression", "memorization") else 32)
    chunk, in_place = window // 2, {"window": window, "fast_layers": (0, 1)}
    student = window if method.endswith("_no_gap") else chunk
    sizes = {"vocab_size": task.vocab_size, "dim": 128, "mlp_dim": 256, "has_tied_head": False}
    name = "ipttcd" if method.startswith("ipttcd") else method
    sizes |= {"num_layers": 2, "num_heads": 4, "method": name}
    memory = MemoryConfig(chunk_size=chunk, block_chunks=1)
    if method.startswith("ipttcd_delta"):
        taps = {"teacher_conv_init": "identity", "student_conv_init": "previous"}
        memory = memory.replace(corrects_errors=True, **taps)
    target = TargetMemoryConfig(chunk_size=chunk, block_chunks=1)
    by_method = {
        "ipttcd": in_place | {"student_window": student, "memory": memory},
        "ipttt": in_place | {"memory": target},
        "lact": {"window": window, "memory": LaCTMemoryConfig(chunk_size=chunk, low_rank=None)},
        "swa": {"window": window},
    }
    return TransformerConfig(**sizes | by_method.get(name, {}) | fields)


def sinusoids(length: int, dim: int) -> Float[Array, "T D"]:
    """[sin | cos] of n * 10000^(-k / (dim/2 - 1)), k = 0 .. dim/2 - 1."""
    half = dim // 2
    frequencies = 10_000.0 ** -(jnp.arange(half) / max(half - 1, 1))
    angles = jnp.arange(length)[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class _DecoderLayer(nnx.Module):
    """gelu(RMSNorm(y) W + b)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        D, dtype = config.dim, config.precision.param_dtype
        self.norm = param(jnp.ones((D,), dtype), ("embed",))
        self.kernel = normal_param(rngs, (D, D), ("embed", "embed_out"), config.init_std, dtype)
        self.bias = param(jnp.zeros((D,), dtype), ("embed_out",))

    def __call__(self, y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = rms_norm(y, self.norm[...], self.config.norm_eps)
        y = linear(y, self.kernel[...], self.config.precision.compute_dtype)
        return jax.nn.gelu(y + self.bias[...].astype(y.dtype), approximate=False)


class Autoencoder(Transformer):
    """Logits [B, T, V] of the tokens [B, T] from the state c [B, D] of their last position alone:

        y_n = gelu(RMSNorm(gelu(RMSNorm(c + sinusoids_n) W_1 + b_1)) W_2 + b_2)

    The transformer's final norm and untied head are applied to y, not to the blocks' output.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.decoder_1 = _DecoderLayer(config, rngs=rngs)
        self.decoder_2 = _DecoderLayer(config, rngs=rngs)

    def normed(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = h[:, -1:] + sinusoids(*h.shape[1:]).astype(h.dtype)
        return super().normed(self.decoder_2(self.decoder_1(y)))


class Problem(NamedTuple):
    """One run's functions: `init(key)` gives parameters, `loss_sum(params, batch)` the loss summed
    over the scored targets of a batch (`sweep.take_rows`), `measure(params, batch)` the `Measures`
    that are averaged over the batches of the test rows."""

    init: Callable[[jax.Array], Any]
    loss_sum: Callable[[Any, Batch], jax.Array]
    measure: Callable[[Any, Batch], Metrics]


def mad_problem(task: MADConfig, config: TransformerConfig) -> Problem:
    """The problem of a task, of which `config` is the model."""
    model_class = Autoencoder if task.task == "compression" else Transformer
    off = switched_off(config, task.num_positions)

    def init(key: jax.Array) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(model_class(config, rngs=nnx.Rngs(key)), nnx.Param))

    def model_with(params: dict[str, Any], config: TransformerConfig = config) -> Transformer:
        model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
        nnx.update(model, params)
        return model

    def loss_sum(params: dict[str, Any], batch: Batch) -> jax.Array:
        return summed_loss(model_with(params)(batch["tokens"]), batch["targets"])

    def measure(params: dict[str, Any], batch: Batch) -> Metrics:
        tokens, targets, model = batch["tokens"], batch["targets"], model_with(params)
        hidden, stats = model.forward(tokens)
        metrics = batch_scores(model.logits(hidden), targets)
        if stats is not None:
            metrics |= stats._asdict()
        if off is not None:
            without = batch_scores(model_with(params, off)(tokens), targets)
            metrics |= {f"{name}_off": value for name, value in without.items()}
        return metrics

    return Problem(init, loss_sum, measure)


def summed_loss(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Float[Array, ""]:
    """Cross entropy summed over scored positions in nats, float32 or better. Differentiable in
    `logits`."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    losses = optax.softmax_cross_entropy_with_integer_labels(wide, jnp.maximum(targets, 0))
    return jnp.sum(losses, where=targets != IGNORE)


def batch_scores(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Metrics:
    """macro_accuracy (the published score), micro_accuracy (the share of scored positions that are
    right) and loss, the mean cross entropy in nats, of one batch; targets of -100 are not scored.

    Macro accuracy is the mean recall over the classes that a batch has as targets *or as
    predictions*: a class that is only predicted counts as a recall of 0. The score of an epoch is
    the plain mean over its batches, not the score of all at once. The prediction is the first of
    the likeliest classes. All are NaN without a scored position.
    """
    predictions, is_scored = jnp.argmax(logits, axis=-1), targets != IGNORE
    is_hit = is_scored & (predictions == targets)

    def count(classes: jax.Array, chosen: jax.Array) -> jax.Array:
        weights = chosen.ravel().astype(jnp.int32)
        return jnp.bincount(classes.ravel(), weights, length=logits.shape[-1])

    num_targets, num_hits = count(targets, is_scored), count(targets, is_hit)
    num_present = jnp.sum(num_targets + count(predictions, is_scored) > 0)
    recalls = num_hits / jnp.maximum(num_targets, 1)
    return {
        "macro_accuracy": jnp.sum(recalls) / num_present,
        "micro_accuracy": jnp.sum(is_hit) / jnp.sum(is_scored),
        "loss": summed_loss(logits, targets) / jnp.sum(is_scored),
    }


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


def programs(config: RecipeConfig, problem: Problem, mesh: Mesh) -> tuple[Any, Any]:
    """The jitted functions of R runs, which the number of devices divides: `init(hyper)` gives a
    `RunState`, `train(state, hyper, rows, test_rows, first, stop)` donates and gives one, after the
    epochs first .. stop - 1, each over all rows in a new order, and the measures then."""
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

    def train(
        run: RunState, hyper: Hyper, rows: Rows, test_rows: Rows, first: jax.Array, stop: jax.Array
    ) -> tuple[RunState, Metrics]:
        key = jax.random.fold_in(jax.random.key(hyper.seed), 1)
        first_rate, decay = (x.astype(jnp.float32) for x in hyper[:2])
        num_rows = len(rows.inputs)

        def rate(step: jax.typing.ArrayLike) -> jax.Array:
            epoch = jnp.asarray(step) // config.steps_per_epoch(num_rows)
            return rate_of_epoch(config, first_rate, epoch, config.num_epochs(num_rows))

        gradients = jax.value_and_grad(lambda x, y, _: (problem.loss_sum(x, y), {}), has_aux=True)
        step = step_with(gradients, _optimizer(rate, decay), rate)

        def one_step(run: RunState, index: jax.Array) -> tuple[RunState, jax.Array]:
            """From a step that fails on, nothing of the run changes."""
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

        run = jax.lax.fori_loop(first, stop, epoch_of, run)
        batches, params = _batches(config, jnp.arange(len(test_rows.inputs))), run.train["params"]
        measures = jax.lax.map(lambda x: problem.measure(params, take_rows(test_rows, x)), batches)
        return run, jax.tree.map(lambda x: x.mean(0), measures)

    return of_all(init, runs), of_all(train, runs, runs, *[whole] * 4, donated=(0,))


def train_runs(
    config: RecipeConfig,
    problem: Problem,
    rows: Rows,
    test_rows: Rows,
    hyper: Hyper,
    *,
    budget_bytes: int | None = None,
    on_evaluation: Callable[[float, float], None] = lambda done, accuracy: None,
) -> list[Run]:
    """All runs of `hyper`, in its order, in groups that fit `budget_bytes` of a device, each half
    of those that do not, evaluated every few epochs and after the last one. Devices beyond the
    number of runs stay idle. `on_evaluation` is called with the share of the work done and the
    group's best macro accuracy.
    """
    num_runs, num_epochs = len(hyper.rate), config.num_epochs(len(rows.inputs))
    devices = jax.devices()[:num_runs]
    mesh = jax.make_mesh((len(devices),), ("runs",), (AxisType.Auto,), devices=devices)
    init, train = programs(config, problem, mesh)
    splits = jax.device_put((rows, test_rows), replicated(mesh))
    per_device = -(-num_runs // mesh.size)
    while True:  # of one size, the last group filled up with copies of the last run
        size = per_device * mesh.size
        padded = np.minimum(np.arange(-(-num_runs // size) * size), num_runs - 1)
        groups = [Hyper(*(x[part] for x in hyper)) for part in padded.reshape(-1, size)]
        lowered = train.lower(jax.eval_shape(init, groups[0]), groups[0], *splits, 0, 0)
        program = lowered.compile()
        if budget_bytes is None or measure.needed_bytes(program) <= budget_bytes or per_device == 1:
            break
        per_device = -(-per_device // 2)
    every, finished = -(-num_epochs // _NUM_EVALUATIONS), []
    for number, group in enumerate(groups):
        state, evaluations = init(group), []
        for first in range(0, num_epochs, every):
            stop = min(first + every, num_epochs)
            state, measures = program(state, group, *splits, first, stop)
            evaluations.append((stop, *jax.device_get((measures, state.loss, state.failed_at))))
            best = evaluations[-1][1]["macro_accuracy"].max()
            on_evaluation((number + stop / num_epochs) / len(groups), best)
            if (evaluations[-1][-1] >= 0).all():
                break
        finished += map(functools.partial(_run, group, evaluations), range(size))
    return finished[:num_runs]


def _run(group: Hyper, evaluations: Sequence[Any], index: int) -> Run:
    """A run of a group, from its (epoch, measures, training loss, first failed step) by time."""
    curve, failed_at, measures = [], -1, {}
    for epoch, *found in evaluations:
        if failed_at < 0:
            measures, loss, failed_at = jax.tree.map(lambda x: x[index].tolist(), found)
            losses = {"loss": measures["loss"], "training_loss": loss}
            losses = {name: x if np.isfinite(x) else None for name, x in losses.items()}
            accuracy = measures["macro_accuracy"]
            curve.append(Point(epoch=epoch, macro_accuracy=accuracy, **losses))
    own: dict[str, Any] = {name: x[index].item() for name, x in group._asdict().items()}
    own["curve"] = tuple(curve)
    if failed_at >= 0:
        return Run(**own, failed_at=failed_at, metrics=None)
    finite = {name: x for name, x in measures.items() if x is not None and np.isfinite(x).all()}
    return Run(**own, failed_at=None, metrics=Measures(**finite))
