"""Parameter names on disk: one entry per layer, `layers/6/mlp/down`, however a model stacks them.

On the devices, scanned layers are stacked into one array, `group_0/block_1/mlp/down` [repeats,
...]; a checkpoint must not depend on which layers are alike, so it stores the rows. An optimizer's
moments have their parameters' names after a prefix. Only this file maps one form to the other.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ttcd_jax.errors import listed
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import layer_slots
from ttcd_jax.train.state import abstract_params


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
Layers = dict[tuple[str, ...], list[str]]  # (group, block) -> its layers in row order


def stored_params(config: TransformerConfig) -> Leaves:
    """Shapes and dtypes of the model's parameters by their names on disk."""
    return unstacked(config, by_name(abstract_params(config)))


def unstacked(config: TransformerConfig, leaves: Leaves) -> Leaves:
    """Leaves of a training state with one leaf per layer: arrays on the same devices (a second copy
    of the stacked ones), tracers or `jax.ShapeDtypeStruct`s."""
    layers, rows = _layers(config), {}
    for name, leaf in leaves.items():
        names = _names_of_rows(layers, name)
        rows |= {name: leaf} if names is None else dict(zip(names, _rows(leaf), strict=True))
    return rows


def stacked(config: TransformerConfig, rows: Leaves, like: Leaves) -> Leaves:
    """The inverse of `unstacked`: arrays sharded as the `jax.ShapeDtypeStruct`s `like`, those of
    numpy where these have none. `rows` is emptied, so that no more than one stacked leaf exists
    twice."""
    layers, leaves = _layers(config), {}
    for name, leaf in like.items():
        names = _names_of_rows(layers, name)
        if names is None:
            leaves[name] = rows.pop(name)
        else:
            leaves[name] = _stack(leaf.sharding)([rows.pop(row) for row in names])
    return leaves


def per_parameter(config: TransformerConfig, value: Callable[[str], float]) -> dict[str, Any]:
    """The value of every parameter by its name on disk, in a tree of the parameters' structure: a
    number, or for stacked layers an array [layers, 1, ...] of their numbers."""
    layers, values = _layers(config), {}
    for name, leaf in by_name(abstract_params(config)).items():
        rows = [value(row) for row in _names_of_rows(layers, name) or ()]
        shape = (len(rows), *[1] * (leaf.ndim - 1))
        values[name] = np.reshape(rows, shape) if rows else value(name)
    return unflatten_dict(values, sep="/")


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


def _layers(config: TransformerConfig) -> Layers:
    layers: Layers = {}
    for layer, slot in enumerate(layer_slots(config)):
        layers.setdefault((slot.group, slot.block), []).append(str(layer))
    return layers


def _names_of_rows(layers: Layers, name: str) -> list[str] | None:
    """The names on disk of a stacked leaf's rows, None for a leaf outside the layers."""
    path = name.split("/")
    for at in range(len(path) - 1):
        if (rows := layers.get(tuple(path[at : at + 2]))) is not None:
            return ["/".join((*path[:at], "layers", row, *path[at + 2 :])) for row in rows]
    return None


def _rows(leaf: Any) -> list[Any]:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        where = None if leaf.sharding is None else _of_row(leaf.sharding)
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=where)] * len(leaf)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
        return _split(_of_row(leaf.sharding))(leaf)
    return [leaf[i, ...] for i in range(len(leaf))]


def _of_row(sharding: Sharding) -> Sharding:
    """The sharding of a row of an array whose leading axis is not sharded."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


@functools.cache
def _split(where: Sharding) -> Callable[[jax.Array], list[jax.Array]]:
    return jax.jit(lambda leaf: list(leaf), out_shardings=where)


@functools.cache
def _stack(where: Sharding | None) -> Callable[[list[Any]], Any]:
    return np.stack if where is None else jax.jit(lambda rows: jnp.stack(rows), out_shardings=where)
