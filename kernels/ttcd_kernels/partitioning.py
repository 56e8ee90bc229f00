"""Kernels under vmap, where a mapped axis joins the batch, and on a mesh, where each device runs
them on its shard of the independent axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

# Axes of each kind of array: batch b, heads n of queries and k of keys, queries t, keys s, numbers
# h. Small letters: of one query per row. Then those of convolutions: chunks c of l tokens, features
# f, taps r, and sums over spans x for both taps y.
_AXES = {"Q": "b t n h", "K": "b s k h", "L": "b t n", "I": "b s"}
_AXES |= {"q": "b n h", "l": "b n", "p": "b"}
_AXES |= {"Z": "b c l f", "P": "b r f", "C": "b c l", "S": "b x y r f"}
_SHARDED = ("b", "k")


def everywhere(function: Callable[..., Any], kinds: str, *arrays: Any) -> Any:
    """`function(*arrays)` under vmap and on a mesh. `kinds` has a letter of `_AXES` for every
    array (or None), as in "QKK -> Q"; the first two arrays are queries and keys (or both z).

    Arrays may be sharded along batch and heads; they are gathered along all other axes. Query heads
    are sharded as their kv heads are: the queries of a single kv head are gathered. Under a
    `shard_map` that is manual along some mesh axes only, all arrays are gathered along the others.
    """
    q, k, *_ = arrays
    group = q.shape[-2] // k.shape[-2]
    # Shardy refuses a factor of size 1 beside others.
    query_heads = "k" if group == 1 else "g" if k.shape[-2] == 1 else "(k g)"
    inputs, outputs = kinds.split(" -> ")
    present = [kind for kind, array in zip(inputs, arrays, strict=True) if array is not None]
    sides = (", ".join(_AXES[kind] for kind in side) for side in (present, outputs))
    rule = " -> ".join(sides).replace("n", query_heads)
    sharded = query_heads.strip("()")[0]  # of query heads the axis that a mesh may split
    names = [_AXES[kind].replace("n", sharded).split() for kind in (*present, *outputs)]
    whole = dict.fromkeys(x for array in names for x in array if x not in _SHARDED)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        # Arrays may arrive with other shardings, even along `whole`: the rule moves no data. The
        # first array sharded along an axis decides; a mesh axis shards one of them only.
        leaves, structure = jax.tree.flatten((arguments, results))
        split: dict[str, Any] = {}
        for array, axes in zip(leaves, names, strict=True):
            spec = getattr(array.sharding, "spec", ())  # none where other mesh axes are manual
            for name, mesh_axes in zip(axes, spec, strict=False):
                taken = {x for parts in split.values() for x in _parts(parts)}
                if name in _SHARDED and mesh_axes and not taken & _parts(mesh_axes):
                    split.setdefault(name, mesh_axes)
        specs = [PartitionSpec(*map(split.get, axes)) for axes in names]
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        arguments, results = jax.tree.unflatten(structure, shardings)
        return mesh, function, results, arguments

    # JAX's partitioner would take defaults of `function` for operands.
    mapped = custom_partitioning(lambda *arrays: function(*arrays))
    options: dict[str, Any] = {"need_replication_factors": tuple(whole)}
    options |= {"g": group} if "(" in query_heads else {}
    mapped.def_partition(partition, sharding_rule=rule, **options)
    return folds_batch(mapped)(*arrays)


def _parts(mesh_axes: str | tuple[str, ...]) -> set[str]:
    return {mesh_axes} if isinstance(mesh_axes, str) else {*mesh_axes}


def folds_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(*arrays)` [B, ...] -> arrays [B, ...] under `vmap`: one call with a larger B. Not
    differentiable: for use inside a custom VJP."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(axis_size: int, in_batched: Any, *arrays: Any) -> Any:
        def fold(x: jax.Array, is_batched: bool) -> jax.Array:
            x = x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        results = mapped(*jax.tree.map(fold, arrays, tuple(in_batched)))
        results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped
