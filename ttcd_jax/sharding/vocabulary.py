"""Vocabulary-parallel embedding lookup."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_jax.sharding.rules import Copies, Shard, sharded, table_axes

TENSOR = "tensor"


def own_entries(
    shard: Shard, ids: Int[Array, "..."], num_entries: int
) -> tuple[jax.Array, jax.Array]:
    """(row in this device's shard of `num_entries` vocabulary entries, whether the entry is in it)
    of every id; an entry of another device has row 0."""
    row = ids - shard.index(TENSOR) * num_entries
    is_own = (row >= 0) & (row < num_entries)
    return jnp.where(is_own, row, 0), is_own


def lookup(table: Float[Array, "V D"] | Copies, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of the table, NaN for a token outside of it: a compiled program cannot refuse."""

    def on_shard(shard: Shard, table: jax.Array, tokens: jax.Array) -> jax.Array:
        row, is_own = own_entries(shard, tokens, len(table))
        found = table[tokens if shard.size(TENSOR) == 1 else row]
        if shard.size(TENSOR) > 1:
            found = shard.sum(jnp.where(is_own[..., None], found, 0), TENSOR)
        is_known = (tokens >= 0) & (tokens < len(table) * shard.size(TENSOR))
        return jnp.where(is_known[..., None], found, jnp.nan)

    rows, (array, axes) = ("batch", "length"), table_axes(table)
    return sharded(on_shard, (axes, rows), rows)(array, tokens)
