"""Parameter names on disk: one entry per layer, `layers/6/mlp/down`, however a model stacks them.

On the devices, scanned layers are stacked into one array, `group_0/block_1/mlp/down` [repeats,
...]; a checkpoint must not depend on which layers are alike, so it stores the rows. An optimizer's
moments have their parameters' names after a prefix. Only this file maps one form to the other.
"""

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ttcd_jax.errors import UserError, listed
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer, layer_slots
from ttcd_jax.train.state import abstract_params, with_params


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of any tree by their path, `params/embedding`, in the order of its leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def misfit(
    model: Mapping[str, Any], stored: Mapping[str, Any], fields: tuple[str, ...] = ("shape",)
) -> str | None:
    """One line with every difference of `stored` from `model`, None when it fits. Both map names
    to arrays (or `jax.ShapeDtypeStruct`s), of which `fields` are compared."""
    groups = {
        "only in the model": sorted(model.keys() - stored.keys()),
        "only in the checkpoint": sorted(stored.keys() - model.keys()),
    }
    common = sorted(model.keys() & stored.keys())
    for field in fields:
        kinds = ((x, getattr(stored[x], field), getattr(model[x], field)) for x in common)
        groups[f"saved with another {field}"] = [
            f"{name} {saved} not {wanted}" for name, saved, wanted in kinds if saved != wanted
        ]
    lines = [f"{len(names)} {kind}: {listed(names)}" for kind, names in groups.items() if names]
    return "; ".join(lines) or None


Leaves = dict[str, Any]


def stored_params(config: TransformerConfig) -> Leaves:
    """Shapes and dtypes of the model's parameters by their names on disk."""
    return unstacked(config, by_name(abstract_params(config)))


def unstacked(config: TransformerConfig, leaves: Leaves) -> Leaves:
    """Leaves of a training state with one leaf per layer: arrays on the same devices (a second copy
    of the stacked ones), tracers or `jax.ShapeDtypeStruct`s."""
    rows = {}
    for name, leaf, names in _with_rows(config, leaves):
        rows |= dict(zip(names, _rows(leaf), strict=True)) if names else {name: leaf}
    return rows


def stacked(config: TransformerConfig, rows: Leaves, like: Leaves) -> Leaves:
    """The inverse of `unstacked`: arrays sharded as `like`, those of numpy where it has none.
    `rows` is emptied, so that no more than one stacked leaf exists twice."""
    leaves = {}
    for name, leaf, names in _with_rows(config, like):
        found = [rows.pop(row) for row in names or [name]]
        where = leaf.sharding  # `jax.jit` knows a function that it was given before
        stack = np.stack if where is None else jax.jit(jnp.stack, out_shardings=where)
        leaves[name] = stack(found) if names else found[0]
    return leaves


def per_parameter(config: TransformerConfig, value: Callable[[str], float]) -> dict[str, Any]:
    """The value of every parameter by its name on disk, in a tree of the parameters' structure: a
    number, or for stacked layers an array [layers, 1, ...] of their numbers."""
    values = {}
    for name, leaf, names in _with_rows(config, by_name(abstract_params(config))):
        shape = (len(names), *[1] * (leaf.ndim - 1))
        values[name] = np.reshape(list(map(value, names)), shape) if names else value(name)
    return unflatten_dict(values, sep="/")


def matching(pattern: str, field: str, names: Collection[str], owner: str) -> list[str]:
    """The `names` on disk that a pattern of a configuration's `field` matches; a `UserError` if
    there is none."""
    if not (found := fnmatch.filter(names, pattern)):
        problem = f"{field} {pattern!r} names no parameter of {owner}, which has "
        raise UserError(problem + ", ".join(by_layers(names)))
    return found


def by_layers(names: Iterable[str]) -> list[str]:
    """`layers/0/mlp/proj`, `layers/6/mlp/proj` as `layers/0,6/mlp/proj`."""
    layers: dict[str, list[int]] = {}
    for name in names:
        layer, rest = re.findall(r"(?:layers/(\d+)/)?(.*)", name)[0]
        layers.setdefault(rest, []).extend([int(layer)] if layer else [])
    return [
        f"layers/{','.join(map(str, sorted(numbers)))}/{rest}" if numbers else rest
        for rest, numbers in layers.items()
    ]


def _with_rows(config: TransformerConfig, leaves: Leaves) -> Iterator[tuple[str, Any, list[str]]]:
    """(name, leaf, names on disk of its rows: none outside the layers) of every leaf."""
    layers: dict[str, list[str]] = {}
    for layer, slot in enumerate(layer_slots(config)):
        layers.setdefault(f"{slot.group}/{slot.block}", []).append(f"layers/{layer}")
    stack = re.compile(rf"(?<![^/])({'|'.join(layers)})(?![^/])")
    for name, leaf in leaves.items():
        found = stack.search(name)
        yield name, leaf, [stack.sub(row, name, 1) for row in layers[found[0]]] if found else []


def _rows(leaf: Any) -> list[Any]:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        where = _of_row(leaf.sharding)
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=where)] * len(leaf)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
        return jax.jit(list, out_shardings=_of_row(leaf.sharding))(leaf)
    return [leaf[i, ...] for i in range(len(leaf))]


def _of_row(sharding: Sharding | None) -> Sharding | None:
    """The sharding of a row of an array whose leading axis is not sharded."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def model_of(config: TransformerConfig, rows: Leaves) -> Transformer:
    leaves = stacked(config, rows, by_name(abstract_params(config)))
    return with_params(config, unflatten_dict(jax.tree.map(jnp.asarray, leaves), sep="/"))
