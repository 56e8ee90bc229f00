"""Words cut along `tensor`: looking them up."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_jax.sharding import rules

TENSOR = "tensor"


def own_words(ids: Int[Array, "..."], num_words: int) -> tuple[jax.Array, jax.Array]:
    """(row of this device's part of `num_words` words, whether the word is in it) of every id,
    inside `rules.sharded`; a word of another device has row 0."""
    row = ids - jax.lax.axis_index(TENSOR) * num_words
    is_own = (row >= 0) & (row < num_words)
    return jnp.where(is_own, row, 0), is_own


def lookup(table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """table[tokens], the table's words cut along `tensor`, the tokens along rows and positions."""
    if not rules.is_distributed():
        return table[tokens]

    def on_part(table, tokens):
        row, is_own = own_words(tokens, table.shape[0])
        return jax.lax.psum(jnp.where(is_own[..., None], table[row], 0), TENSOR)

    tokens_axes = ("batch", "length")
    return rules.sharded(on_part, (("vocab", None), tokens_axes), (*tokens_axes, None))(
        table, tokens
    )
