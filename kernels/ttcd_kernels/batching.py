"""vmap for functions whose arrays all lead with a batch axis: the mapped axis joins it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def folds_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(*arrays)` [B, ...] -> arrays [B, ...] under `vmap`: one call with a larger B. Not
    differentiable by itself: for use inside a custom VJP."""
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
