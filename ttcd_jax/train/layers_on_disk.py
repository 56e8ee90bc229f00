"""Parameter names on disk: one entry per layer, `layers/6/mlp/down`, however a model stacks them.

In memory the layers that are scanned over are one array, `group_0/block_1/mlp/down` [repeats, ...].
A checkpoint must not depend on which layers are alike, so it stores row by row. An optimizer's
moments have the names of their parameters, after a prefix of their own. This file is the only map
between the two.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import place_of_layer
from ttcd_jax.train.state import abstract_params

Names = tuple[str, ...]
Leaves = dict[Names, Any]


def stored_params(config: TransformerConfig) -> Leaves:
    """Shapes and dtypes of the model's parameters by their names on disk."""
    return unstacked(config, flatten_dict(abstract_params(config)))


def unstacked(config: TransformerConfig, leaves: Mapping[Names, Any]) -> Leaves:
    """Leaves of a training state, by path, with a leaf per layer: arrays, on the devices they are
    on (a second copy of the stacked ones), tracers or `jax.ShapeDtypeStruct`s."""
    table, rows = _table(config), {}
    for path, leaf in leaves.items():
        names = _of_rows(table, path)
        rows |= {path: leaf} if names is None else dict(zip(names, _rows(leaf), strict=True))
    return rows


def stacked(config: TransformerConfig, rows: Leaves, like: Mapping[Names, Any]) -> Leaves:
    """The inverse of `unstacked`: arrays placed as the `jax.ShapeDtypeStruct`s `like`. `rows` is
    emptied, so that no more than one stacked leaf exists twice."""
    table, leaves = _table(config), {}
    for path, leaf in like.items():
        names = _of_rows(table, path)
        if names is None:
            leaves[path] = rows.pop(path)
        else:
            leaves[path] = _stack(leaf.sharding)([rows.pop(name) for name in names])
    return leaves


def _table(config: TransformerConfig) -> dict[Names, list[str]]:
    """The layers of a block by the names of its group and itself, in the order of their rows."""
    table: dict[Names, list[str]] = {}
    for layer in range(config.num_layers):
        place = place_of_layer(config, layer)
        layers = table.setdefault((place.group, place.block), [])
        assert place.row == len(layers), f"layer {layer} is row {place.row} of {place.group}"
        layers.append(str(layer))
    return table


def _of_rows(table: dict[Names, list[str]], path: Names) -> list[Names] | None:
    """The paths of a stacked leaf's rows, None for a leaf of no layer."""
    for at in range(len(path) - 1):
        if (layers := table.get(path[at : at + 2])) is not None:
            return [(*path[:at], "layers", layer, *path[at + 2 :]) for layer in layers]
    return None


def _rows(leaf: Any) -> list[Any]:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        where = None if leaf.sharding is None else _of_row(leaf.sharding)
        row = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=where)
        return [row] * len(leaf)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
        return _split(_of_row(leaf.sharding))(leaf)
    return [leaf[i, ...] for i in range(len(leaf))]


def _of_row(sharding: Sharding) -> Sharding:
    """The sharding of a row of an array whose leading axis is on every device."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


@functools.cache
def _split(where: Sharding) -> Callable[[jax.Array], list[jax.Array]]:
    return jax.jit(lambda leaf: list(leaf), out_shardings=where)


@functools.cache
def _stack(where: Sharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(lambda rows: jnp.stack(rows), out_shardings=where)
