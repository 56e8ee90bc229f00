"""Kernels under vmap, where a mapped axis joins the batch, and on a mesh, where each device runs
them on its shard of the independent axes."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped


def everywhere(
    function: Callable[..., Any],
    kinds: str,
    axes: Mapping[str, str],
    arrays: Sequence[Shaped[Array, "..."] | None],
    whole: Iterable[str],
) -> Any:
    """`function(*arrays)` under vmap and on a mesh. `kinds` has a letter for every array,
    as in "QKK -> Q"; `axes` names the axes of each kind, as in "b t n h". The first two arrays are
    the queries [..., N, H] with their heads as axis n, and the keys [..., K, H] with theirs as k.

    Arrays may be sharded along every axis but those in `whole`, along which they are gathered
    first. Query heads are sharded as their kv heads are: the queries of a single kv head are
    gathered. Under a `shard_map` that is manual along some mesh axes only, all arrays are gathered
    along the others.
    """
    q, k = arrays[:2]
    assert q is not None
    assert k is not None
    group = q.shape[-2] // k.shape[-2]
    # Shardy refuses a factor of size 1 beside others.
    query_heads = "k" if group == 1 else "g" if k.shape[-2] == 1 else "(k g)"
    axes = {kind: names.replace("n", query_heads) for kind, names in axes.items()}
    inputs, outputs = kinds.split(" -> ")
    present = [kind for kind, array in zip(inputs, arrays, strict=True) if array is not None]
    sides = [[axes[kind] for kind in side] for side in (present, outputs)]
    names = [_names(array) for side in sides for array in side]
    rule = " -> ".join(map(", ".join, sides))
    in_order = dict.fromkeys(name for array in names for name in array)
    whole = [name for name in in_order if name in {*whole, "g"}]

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        # Arrays may arrive with other shardings, even along `whole`: the rule moves no data.
        leaves, structure = jax.tree.flatten((arguments, results))
        mesh_axes = _axes_by_name(zip(leaves, names, strict=True), whole)
        specs = [PartitionSpec(*map(mesh_axes.get, array)) for array in names]
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        arguments, results = jax.tree.unflatten(structure, shardings)
        return mesh, function, results, arguments

    mapped = custom_partitioning(function)
    options: dict[str, Any] = {"need_replication_factors": tuple(whole)}
    options |= {"g": group} if "(" in query_heads else {}
    mapped.def_partition(partition, sharding_rule=rule, **options)
    return folds_batch(mapped)(*arrays)


def _names(array: str) -> list[str]:
    """The name of each axis; of a compound axis, that of its first part."""
    return [name.strip("()").split()[0] for name in re.findall(r"\([^)]*\)|\w+", array)]


def _axes_by_name(arrays: Iterable[tuple[Any, list[str]]], whole: Sequence[str]) -> dict[str, Any]:
    """The mesh axes that shard each axis of the rule, as in the first array sharded along it; a
    mesh axis shards one of them only."""
    mesh_axes: dict[str, Any] = {}
    taken: set[str] = set()
    for array, names in arrays:
        spec = getattr(array.sharding, "spec", ())  # none where other mesh axes are manual
        for name, axis in zip(names, spec, strict=False):
            parts = set(axis if isinstance(axis, tuple) else (axis,))
            if axis and name not in whole and name not in mesh_axes and not taken & parts:
                mesh_axes[name] = axis
                taken |= parts
    return mesh_axes


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
