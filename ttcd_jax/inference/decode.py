"""Decoding: one token of every row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ttcd_jax.inference.advance import advance, head_logits
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.prefill import MemoryMode, check_memory
from ttcd_jax.inference.state import InferenceState, cache_slots
from ttcd_jax.nn.row import check_array


@functools.partial(jax.jit, static_argnames="memory", donate_argnums=1)
def decode(
    model: InferenceModel,
    state: InferenceState,
    tokens: np.ndarray | jax.Array,
    is_active: np.ndarray | jax.Array | None = None,
    memory: MemoryMode = "kept",
) -> tuple[Float[Array, "B V"], InferenceState]:
    """(logits after the tokens [B], state after them). One compiled program serves all positions;
    `state` is donated: do not use it again.

    A row's memory is written at the token that fills its chunk. Rows that are not `is_active` [B]
    (default: all) keep their state; ignore their logits. With full attention a token beyond the
    state's `max_length` gives NaN, and so does one outside the vocabulary, since raising would have
    to wait for every token. Raises `UserError` for tokens that are not int [B].
    """
    check_memory(model.config, memory)
    tokens = jnp.asarray(tokens)
    check_array("the state", "tokens", tokens, "int", len(state.position))
    active = jnp.ones(len(tokens), bool) if is_active is None else jnp.asarray(is_active, bool)
    hidden, state = one_token(model, state, tokens, active, memory)
    return head_logits(model, hidden), state


def one_token(
    model: InferenceModel,
    state: InferenceState,
    tokens: jax.Array,
    is_active: jax.Array,
    memory: MemoryMode,
) -> tuple[Float[Array, "B D"], InferenceState]:
    """(final hidden states, state after the tokens [B]), as part of a larger program."""
    is_plain = True if memory == "published" else None
    lengths = is_active.astype(jnp.int32)
    hidden, state = advance(
        model, state, tokens[:, None], lengths, halo=0, has_gap=False, is_plain=is_plain
    )
    slots = cache_slots(state)
    if model.config.window is None and slots is not None:
        hidden = jnp.where(state.position[:, None, None] <= slots, hidden, jnp.nan)
    return hidden[:, 0], state
