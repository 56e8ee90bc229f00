"""Kernels on a sharded mesh: each device runs one on its own part of the independent axes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning


def partitioned(
    function: Callable[..., Any], rule: str, whole: Sequence[str], **sizes: int
) -> Callable[..., Any]:
    """`function(*arrays)` whose arrays the compiler may split along every axis of `rule` but those
    in `whole` (in the order in which the rule first names them), which it gathers first.

    `rule` names axes as Shardy does, "b t (k g) h, ... -> ...", a group per array; `sizes` gives
    the parts of compound axes.
    """
    mapped = custom_partitioning(function)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        shardings = (jax.tree.map(lambda x: x.sharding, tree) for tree in (results, arguments))
        return mesh, function, *shardings

    facts: dict[str, Any] = {"need_replication_factors": tuple(whole), **sizes}
    mapped.def_partition(partition, sharding_rule=rule, **facts)
    return mapped
