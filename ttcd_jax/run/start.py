"""A run that starts from another one's parameters: any whose layers fit, whatever method they
train, by their names on disk."""

import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from ttcd_jax.errors import CheckpointError, UserError
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import RunDirectory, model_config, open_checkpoints
from ttcd_jax.sharding.batch import replicated
from ttcd_jax.train.fit import misfit
from ttcd_jax.train.layers_on_disk import Leaves, stacked, stored_params, unstacked
from ttcd_jax.train.state import TrainState, init_params


class StartPlan(NamedTuple):
    """What becomes of the parameters, by their names on disk."""

    taken: tuple[str, ...]
    initialised: tuple[str, ...]
    dropped: tuple[str, ...]

    def lines(self) -> list[str]:
        """The parameters that are not taken, a line for each name with all its layers."""
        return [
            *(f"initialised: {name}" for name in _by_layers(self.initialised)),
            *(f"dropped: {name}" for name in _by_layers(self.dropped)),
        ]


def inherited_model(
    run_dir: RunDirectory,
) -> Callable[[str, dict[str, Any]], TransformerConfig | None]:
    """For `load_config`: a run without a model of its own has that of the run it starts from, but
    for what is bound singly; once it has started, that of its own directory."""

    def inherit(field: str, values: dict[str, Any]) -> TransformerConfig | None:
        start_from = values.get("start_from")
        if field != "model" or not isinstance(start_from, str):
            return None
        return model_config(run_dir if run_dir.is_claimed else RunDirectory(start_from))

    return inherit


def plan_start(config: RunConfig) -> StartPlan:
    """What this run takes of `start_from`; nothing is read but its configuration. Raises
    `UserError` for a pattern of `start_drops` that names nothing, `CheckpointError` for parameters
    of another shape, and for those that the model lacks."""
    assert config.start_from is not None
    stored = _named(stored_params(model_config(RunDirectory(config.start_from))))
    model = _named(stored_params(config.model))
    dropped: set[str] = set()
    for pattern in config.start_drops:
        found = fnmatch.filter(stored, pattern)
        if not found:
            raise UserError(
                f"RunConfig.start_drops {pattern!r} names no parameter of {config.start_from!r}, "
                f"which has {', '.join(_by_layers(stored))}"
            )
        dropped |= set(found)
    offered = {name: leaf for name, leaf in stored.items() if name not in dropped}
    problem = misfit({name: leaf for name, leaf in model.items() if name in offered}, offered)
    if problem:
        raise CheckpointError(
            f"the model does not fit the parameters of start_from {config.start_from!r}: "
            f"{problem}; change TransformerConfig, or name in RunConfig.start_drops those to leave"
        )
    initialised = tuple(name for name in model if name not in offered)
    return StartPlan(tuple(offered), initialised, tuple(sorted(dropped)))


def started_state(config: RunConfig, mesh: Mesh) -> tuple[int, StartPlan, TrainState]:
    """(step of the other run, what was taken of it, state on `mesh`): the newest parameters of
    `start_from`; those that it lacks, and all else, fresh."""
    assert config.start_from is not None
    plan, model = plan_start(config), config.model
    abstract = flatten_dict(build.abstract_state(config, mesh)["params"])
    on_disk = unstacked(model, abstract)
    step, rows = _taken(RunDirectory(config.start_from), plan, on_disk, mesh)
    lacking = {path: leaf.sharding for path, leaf in on_disk.items() if path not in rows}

    def fresh() -> Leaves:
        drawn = unstacked(model, flatten_dict(init_params(model, config.seed)))
        return {path: drawn[path] for path in lacking}

    rows |= jax.jit(fresh, out_shardings=lacking)()
    params = unflatten_dict(stacked(model, rows, abstract))
    return step, plan, build.state_of(config, mesh, params)


def _taken(
    directory: RunDirectory, plan: StartPlan, on_disk: Leaves, mesh: Mesh
) -> tuple[int, Leaves]:
    """(step, parameters that are taken, as `on_disk` has them)."""
    stored = stored_params(model_config(directory))
    like = {path: _like(leaf, on_disk.get(path), mesh) for path, leaf in stored.items()}
    with open_checkpoints(directory) as checkpoints:
        step, params = checkpoints.restore_params(unflatten_dict(like))
    rows: Leaves = flatten_dict(params)
    return step, {
        path: leaf.astype(on_disk[path].dtype)
        for path, leaf in rows.items()
        if "/".join(path) in plan.taken
    }


def _like(stored: Any, wanted: Any | None, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """A stored leaf, placed as the row that it becomes; what is dropped, on every device."""
    where = replicated(mesh)
    if wanted is not None and wanted.shape == stored.shape:
        where = wanted.sharding
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=where)


def _named(leaves: Leaves) -> dict[str, Any]:
    return {"/".join(path): leaf for path, leaf in leaves.items()}


def _by_layers(names: Iterable[str]) -> list[str]:
    """`layers/0/mlp/proj`, `layers/6/mlp/proj` as `layers/0,6/mlp/proj`."""
    layers: dict[str, list[int]] = {}
    for name in names:
        layer, rest = re.findall(r"(?:layers/(\d+)/)?(.*)", name)[0]
        layers.setdefault(rest, []).extend([int(layer)] if layer else [])
    return [
        f"layers/{','.join(map(str, sorted(own)))}/{rest}" if own else rest
        for rest, own in layers.items()
    ]
