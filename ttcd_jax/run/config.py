"""The configuration of a run: the root of every .gin file and of `config.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from ttcd_jax.config import Bound, Config, NonNegative, Place, Positive, PositiveFloat, closest
from ttcd_jax.data.sources import DataConfig
from ttcd_jax.errors import UserError, listed
from ttcd_jax.measure.task import Task
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.run.trackers import TRACKERS
from ttcd_jax.sharding.mesh import MeshConfig
from ttcd_jax.tasks.perplexity import Perplexity
from ttcd_jax.train.loss import DEFAULT_ROWS
from ttcd_jax.train.metrics import IN_STEP, METRICS
from ttcd_jax.train.optimizer import MuonSettings, OptimizerConfig

Steps = Annotated[int, Bound("in 1 .. 2^31 - 1", lambda steps: 0 < steps < 2**31)]
SpikeFactor = Annotated[float, Bound("above 1, at most 1e6", lambda value: 1 < value <= 1e6)]

# The fields that may change when a run is resumed: sharding, parts of a step, recomputation,
# reports, and the treatment of bad steps.
LAYOUT = (
    *("mesh", "accumulation_steps", "loss_rows", "evaluate_every", "evaluations", "trackers"),
    *("max_skipped_steps", "spike_factor", "model.remat", "model.scans_layers", "metrics"),
    "data_workers",
)
# Those that make another run. All others change when the user names them.
LASTING = (
    *("model", "data", "batch_size", "seed", "start_from", "start_drops", "optimizer.kind"),
    "optimizer.rates",
)
# The paths of data may change, since their digests decide.
DATA_PATHS = (
    *("CorpusConfig.path", "TokenizerConfig.path", "RecordsConfig.paths", "RecordsConfig.folders"),
)


class RunConfig(Config):
    """A `model`, its training `data` and `optimizer`, trained for `steps` steps of `batch_size`
    rows, which are computed in `accumulation_steps` parts one after another on the devices of
    `mesh`; None: as `ttcd_jax.run.layout` chooses for the available devices. `seed` decides
    parameters and the order of data. `loss_rows`: rows of logits computed at once. `data_workers`:
    processes on each node that make its batches, where a thread is too slow (`data_wait`).

    `start_from`: a run directory whose newest parameters this run starts from, with a fresh
    optimizer; missing ones are drawn. `start_drops`: patterns (`layers/*/mlp/proj`) of parameters
    that are not taken from it.

    `log_every`: steps between two lines of metrics. `evaluate_every`: steps between the
    `evaluations`, tasks with their options, on the current parameters, None for none. `trackers`:
    those that receive the metrics besides `metrics.jsonl` and TensorBoard. `metrics`: the numbers
    of a step in `metrics.jsonl` besides its loss, by the names in `ttcd_jax.train.metrics`:
    "memory_ratio", "gate_mean" and "window_share" of memories, "distillation" (the gap between
    student and teacher of every layer with a teacher, with and without the memory; a forward pass
    per logged step), and your own.

    A checkpoint is saved every `checkpoint_every` steps, and `checkpoint_minutes` after the last
    one. The newest `keep_checkpoints` are kept, those of steps divisible by `keep_every`, and the
    `keep_best` best by `best_metric`, a metric of the evaluations as `metrics.jsonl` names it: then
    the steps that are evaluated are saved too.

    `max_skipped_steps`: so many bad steps of a run are skipped, the next one ends it. Bad is a loss
    or gradient that is not finite and, with `spike_factor`, a gradient norm above so many times its
    average (`ttcd_jax.train.bad_steps`).

    `memory_warmup`: so many steps in which the rate eta of the memories rises linearly from 0, in
    training alone; evaluations read with the whole eta.
    """

    model: TransformerConfig
    data: DataConfig
    optimizer: OptimizerConfig
    steps: Steps
    batch_size: Annotated[int, Bound("in 1 .. 16,777,216", lambda rows: 0 < rows <= 2**24)]
    accumulation_steps: Positive | None = None
    seed: Annotated[int, Bound("in 0 .. 2^32 - 1", lambda seed: 0 <= seed < 2**32)] = 0
    log_every: Positive = 10
    checkpoint_every: Positive = 200
    checkpoint_minutes: PositiveFloat | None = None
    keep_checkpoints: Positive = 3
    keep_every: Positive | None = None
    keep_best: Positive | None = None
    best_metric: str | None = None
    loss_rows: Positive = DEFAULT_ROWS
    evaluate_every: Positive | None = None
    evaluations: tuple[Task, ...] = (Perplexity(),)
    max_skipped_steps: NonNegative = 0
    spike_factor: SpikeFactor | None = None
    start_from: Place = None
    start_drops: tuple[str, ...] = ()
    memory_warmup: NonNegative = 0
    trackers: tuple[str, ...] = ()
    metrics: tuple[str, ...] = IN_STEP
    data_workers: NonNegative = 0
    mesh: MeshConfig | None = None

    @property
    def counts_skips(self) -> bool:
        """Whether the training state counts bad steps."""
        return self.max_skipped_steps > 0 or self.spike_factor is not None

    def validate(self) -> None:
        names = [task.name for task in self.evaluations]
        if len(set(names)) < len(names):
            raise UserError(
                f"RunConfig.evaluations has tasks {', '.join(names)}: their metrics would have the "
                "same names, keep one of each"
            )
        if self.evaluate_every is not None and not names:
            raise UserError(
                f"RunConfig.evaluate_every {self.evaluate_every} without evaluations: name some, "
                "or set evaluate_every None"
            )
        for name in self.trackers:
            TRACKERS.named(name)
        for name in self.metrics:
            METRICS.named(name).check(self.model)
        for name in ("metrics", "trackers"):
            if len(set(values := getattr(self, name))) < len(values):
                raise UserError(f"RunConfig.{name} {values} names one twice: keep one of each")
        if self.start_drops and self.start_from is None:
            raise UserError(
                f"RunConfig.start_drops {self.start_drops} without RunConfig.start_from: set the "
                "run whose parameters it names"
            )
        task = (self.best_metric or "").split("/")[0]
        is_scored = self.evaluate_every is not None and task in names
        if (self.keep_best is None) != (not task) or (task and not is_scored):
            raise UserError(
                f"RunConfig.keep_best {self.keep_best} with best_metric {self.best_metric!r}: set "
                "both, the metric as TASK/VARIANT/BUCKET of one of evaluations, and evaluate_every"
            )
        parts, rows = self.accumulation_steps, self.batch_size
        if parts and rows % parts:
            raise UserError(f"accumulation_steps {parts} does not divide batch_size {rows}")


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration in the fields of this version."""
    config = dict(config)
    if config.pop("logs_distillation", False):
        config["metrics"] = [*IN_STEP, "distillation"]
    optimizer = config.get("optimizer")
    if isinstance(optimizer, dict) and "settings" not in optimizer:  # Muon's were among all others
        default, own = MuonSettings().to_dict(), dict(optimizer)
        muon = {name: own.pop(name, default[name]) for name in default if name != "type"}
        is_own = own.get("kind") == "muon" and default != default | muon
        config["optimizer"] = own | {"settings": default | muon if is_own else None}
    tasks = config.get("evaluations")
    if isinstance(tasks, list) and all(isinstance(task, dict) for task in tasks):
        once = ("data", None), ("metadata", None)  # options of tasks, at their defaults
        config["evaluations"] = [dict(x for x in y.items() if x not in once) for y in tasks]
    return config


def common_fields(stored: dict[str, Any]) -> dict[str, Any]:
    """The fields of a stored configuration or manifest in which the processes of a job must not
    differ, by their paths: all but the paths of data, which may be local to a node."""
    leaves = by_path(stored).items()
    return {path: value for path, (name, value) in leaves if name not in DATA_PATHS}


def accepted_changes(
    run_dir: Path,
    old: dict[str, Any],
    new: dict[str, Any],
    named: Sequence[str] | None,
    layout: Sequence[str] = LAYOUT,
) -> list[dict[str, Any]]:
    """{field, old, new} of every difference: of the fields `named`, by their names in .gin files or
    their paths, and of the paths of data, whose digests are compared elsewhere. Those of `layout`
    differ freely. Raises `UserError` for a name without a field, and for any other difference. None
    are named where the command has no --change."""
    is_run = old.get("type") == RunConfig.__name__ == new.get("type")
    if is_run and old is not new:
        old = RunConfig.from_dict(old).to_dict()  # earlier versions stored fewer fields
    before, after = by_path(old), by_path(new)
    fields = {path: name for path, (name, _) in (before | after).items()}
    known = [*fields.values(), *fields]
    for name in set(named or ()).difference(known):
        raise UserError(f"--change={name} names no field{closest(name, known)}")
    accepted, lasting, others = [], [], {}
    for path, field in fields.items():
        start, now = (leaves.get(path, (field, None))[1] for leaves in (before, after))
        if start == now or _is_below(path, layout):
            continue
        # A clip that begins or ends gives the optimizer's state another structure.
        lasts = _is_below(path, LASTING)
        lasts |= path == "optimizer.clip_norm" and None in (start, now)
        if field in DATA_PATHS or (not lasts and {field, path} & {*(named or ())}):
            accepted.append({"field": field, "old": start, "new": now})
        else:
            others[f"{path}: {start} -> {now}"] = f"--change={field}"
            lasting += [f"{path}: {start} -> {now}"] if lasts or not is_run else []
    if others:
        change = f"add {' '.join(others.values())} to change this run, or "
        raise UserError(
            f"{run_dir} holds a run of another configuration: {listed(lasting or [*others])}; "
            f"{'' if lasting or named is None else change}choose another --run_dir, or start again "
            "with the old configuration"
        )
    return accepted


def _is_below(path: str, parts: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{part}.") for part in parts)


def by_path(config: dict[str, Any], path: str = "") -> dict[str, tuple[str, Any]]:
    """{path: (name in .gin files, value)} of every value below `config`, made by `to_dict`."""
    leaves = {}
    for key, value in config.items():
        if key == "parts" and isinstance(value, list):  # of a mixture
            value = {str(number): part for number, part in enumerate(value)}
        below = by_path(value, f"{path}{key}.") if isinstance(value, dict) else None
        leaves |= below or {path + key: (f"{config.get('type', '')}.{key}", value)}
    return leaves
