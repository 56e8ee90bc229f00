"""The start of a run from the parameters of another run, matched by their names on disk: of any run
whose layers fit, whatever its method."""

from typing import Any, NamedTuple

import jax
from flax.traverse_util import unflatten_dict

from ttcd_jax.data.tokenizer import TokenizerConfig, build_tokenizer
from ttcd_jax.errors import CheckpointError, UserError
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.run.bindings import Inherit
from ttcd_jax.run.build import Program
from ttcd_jax.run.config import RunConfig, by_path
from ttcd_jax.run.directory import RunDirectory, model_config, open_checkpoints, tokenizer_config
from ttcd_jax.sharding.rules import replicated
from ttcd_jax.train import layers_on_disk as disk
from ttcd_jax.train.state import TrainState, init_params, placed_as


class StartPlan(NamedTuple):
    """Names on disk of the parameters that a run takes from another, draws anew, or leaves out; the
    model's fields that both have with other values, `field: theirs -> ours`."""

    taken: tuple[str, ...]
    initialised: tuple[str, ...]
    dropped: tuple[str, ...]
    changed: tuple[str, ...]

    def lines(self) -> list[str]:
        """The parameters that are not taken, one line per name with all its layers, and the fields
        that have changed."""
        kinds = {"initialised": self.initialised, "dropped": self.dropped}
        lines = [f"{kind}: {x}" for kind, names in kinds.items() for x in disk.by_layers(names)]
        return lines + [f"changed: {x}" for x in self.changed]


def inherited_model(run_dir: RunDirectory | None = None) -> Inherit:
    """The model of a run whose recipe has none, for `load_config`: its own directory's once it has
    started, else the `starting_model` of `start_from`. Single bound fields override it."""

    def inherit(field: str, values: dict[str, Any]) -> TransformerConfig | None:
        start_from = values.get("start_from")
        if field != "model" or not isinstance(start_from, str):
            return None
        if run_dir is not None and run_dir.is_claimed:
            return model_config(run_dir)
        try:
            return starting_model(start_from)
        except (UserError, OSError) as error:  # of a bucket; gin would hide the address
            kind = type(error) if isinstance(error, UserError) else UserError
            reason = getattr(error, "strerror", error)
            raise kind(f"RunConfig.start_from {start_from!r} gives no model: {reason}") from error

    return inherit


def starting_model(start_from: str) -> TransformerConfig:
    """The model of the run in `start_from`, with float32 parameters, whatever its files have."""
    model = model_config(RunDirectory(start_from))
    return model.replace(precision=model.precision.replace(param="float32"))


def plan_start(config: RunConfig) -> StartPlan:
    """The parameters that this run takes from `start_from`, from the configurations alone. Raises
    `UserError` for a pattern of `start_drops` that names nothing and for data of another tokenizer,
    `CheckpointError` for parameters of another shape or unknown to the model."""
    assert config.start_from is not None
    theirs = model_config(RunDirectory(config.start_from))
    stored, model = disk.stored_params(theirs), disk.stored_params(config.model)
    where = "RunConfig.start_drops", stored, repr(config.start_from)
    dropped = {x for pattern in config.start_drops for x in disk.matching(pattern, *where)}
    offered = {name: leaf for name, leaf in stored.items() if name not in dropped}
    problem = disk.misfit({name: leaf for name, leaf in model.items() if name in offered}, offered)
    if problem:
        raise CheckpointError(
            f"the model does not fit the parameters of start_from {config.start_from!r}: "
            f"{problem}; change TransformerConfig, or name in RunConfig.start_drops those to leave"
        )
    changed: list[str] = []
    if "embedding" in offered:
        changed += _changed_tokenizer(config.start_from, getattr(config.data, "tokenizer", None))
    initialised = tuple(name for name in model if name not in offered)
    before, after = by_path(theirs.to_dict()), by_path(config.model.to_dict())
    both = ((path, before[path][1], after[path][1]) for path in after if path in before)
    changed += [
        f"{path}: {old} -> {new}"
        for path, old, new in both
        if old != new and path not in ("remat", "scans_layers")  # how it is computed
    ]
    return StartPlan(tuple(offered), initialised, tuple(sorted(dropped)), tuple(changed))


def _changed_tokenizer(start_from: str, own: TokenizerConfig | None) -> list[str]:
    """The fields of the tokenizer that this run chooses otherwise. Raises `UserError` for another
    tokenizer, and for bos and eos that nobody chose."""
    theirs = tokenizer_config(RunDirectory(start_from))
    if own is None or theirs is None:
        return []
    ours, base = build_tokenizer(own), build_tokenizer(theirs)
    if ours.digest != base.digest:
        fields = {"kind": theirs.kind} | ({"path": theirs.path} if theirs.path else {})
        remedy = " and ".join(f"TokenizerConfig.{name} = {x!r}" for name, x in fields.items())
        raise UserError(
            f"start_from {start_from!r} has learned tokens of {theirs.path or 'bytes'}, the data "
            f"are read as those of {own.path or 'bytes'}: set {remedy}, or drop its 'embedding' "
            "(RunConfig.start_drops)"
        )
    names = ("bos_id", "eos_id", "stop_ids", "adds_bos")
    found = {x: (getattr(base, x), getattr(ours, x)) for x in names}
    changed = {x: pair for x, pair in found.items() if pair[0] != pair[1]}
    if own.bos_id is None and own.eos_id is None and changed.keys() & {"bos_id", "eos_id"}:
        as_there = ", ".join(f"TokenizerConfig.{x} = {old!r}" for x, (old, _) in changed.items())
        raise UserError(
            f"start_from {start_from!r} begins and ends documents with tokens {base.bos_id} and "
            f"{base.eos_id}, the data would with {ours.bos_id} and {ours.eos_id}: set {as_there}, "
            "or bos_id and eos_id as the data should have them"
        )
    return [f"tokenizer {x}: {old} -> {new}" for x, (old, new) in changed.items()]


def started_state(program: Program) -> tuple[int, StartPlan, TrainState]:
    """(step of the other run, plan, state) with the newest parameters of `start_from`; those that
    it lacks, and all else, are initialised."""
    config, model = program.config, program.config.model
    assert config.start_from is not None
    plan, abstract = plan_start(config), disk.by_name(program.state["params"])
    wanted, whole = disk.unstacked(model, abstract), replicated(program.mesh)
    source = RunDirectory(config.start_from)
    stored = disk.stored_params(model_config(source))
    # What is dropped is read whole.
    where = {name: wanted[name].sharding if name in plan.taken else whole for name in stored}
    like = unflatten_dict(placed_as(stored, where), sep="/")
    with open_checkpoints(source) as checkpoints:
        step, state = checkpoints.restore({"params": like})
    read = disk.by_name(state["params"])
    rows = {name: read[name].astype(wanted[name].dtype) for name in plan.taken}
    missing = {name: leaf.sharding for name, leaf in wanted.items() if name not in rows}

    def fresh() -> disk.Leaves:
        drawn = disk.unstacked(model, disk.by_name(init_params(model, config.seed)))
        return {name: drawn[name] for name in missing}

    rows |= jax.jit(fresh, out_shardings=missing)()
    params = unflatten_dict(disk.stacked(model, rows, abstract), sep="/")
    return step, plan, program.state_with(params)
