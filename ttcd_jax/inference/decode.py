"""The forward pass of inference: the model on the next piece of every row; decoding: one token."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.errors import UserError
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.state import InferenceState
from ttcd_jax.models.config import TransformerConfig, has_in_place_memory, memory_chunk
from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.nn.row import Cut, Hidden, Piece, check_array
from ttcd_jax.sharding.rules import constrain, gathered, lookup
from ttcd_jax.train.loss import token_scores

# "kept": the memory is written by prompts and by decoding. "published": as in the authors' code,
# it is empty before every prompt, and off in decoding and in prompts shorter than a chunk.
MemoryMode = Literal["kept", "published"]


def advance(
    model: InferenceModel,
    state: InferenceState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    halo: int = 0,
    has_gap: bool = False,
    is_plain: Bool[Array, " B"] | Literal[True] | None = None,
) -> tuple[Hidden, InferenceState]:
    """(final normed hidden states, state after the piece) of the next tokens of every row.

    The first `lengths` of a row's T positions are tokens, the others padding; a row of length 0
    keeps its state. `nn.row.Piece` says which pieces fit the chunks of memories, and what `halo`,
    `has_gap` and `is_plain` are. T = 1 fits any state and needs no halo.
    """
    chunk_size = memory_chunk(model.config)
    phase = None if chunk_size is None else (state.position - state.chunk_start) % chunk_size
    h, layers = embedded(model, tokens), []
    cut = Cut(chunk_size, model.config.window)
    piece = Piece(state.position, lengths, phase, halo, has_gap, is_plain, h, cut)
    for graph, params, before in zip(model.blocks, model.layers, state.layers, strict=True):
        params = nnx.map_state(lambda _, weight: weight.replace(_whole(model, weight)), params)
        h, after = nnx.merge(graph, params).extend(h, piece, before)
        h = constrain(h, "batch", "length", None)
        layers.append(after)
    hidden = _normed(model, h)
    state = state._replace(position=state.position + lengths, layers=tuple(layers))
    return hidden, state


def head_logits(
    model: InferenceModel, hidden: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
    """Logits of final hidden states, in the compute dtype."""
    head = head_weight(model).astype(hidden.dtype)
    if hidden.size == head.shape[1] and jnp.finfo(hidden.dtype).bits == 16:
        # XLA on a CPU would copy the head in float32 for one row, and for two it does not.
        pair = jnp.broadcast_to(hidden.reshape(1, -1), (2, hidden.size))
        logits = jnp.einsum("XD,VD->XV", pair, head, preferred_element_type=jnp.float32)[0]
        return logits.astype(hidden.dtype).reshape(*hidden.shape[:-1], -1)
    return jnp.einsum("...D,VD->...V", hidden, head)


def head_weight(model: InferenceModel) -> Float[Array, "V D"]:
    return _whole(model, model.head)


@jax.jit
def embedded(model: InferenceModel, tokens: Int[Array, "B T"]) -> Hidden:
    """The residual stream before all blocks."""
    table = _whole(model, model.embedding)
    return lookup(table.astype(model.config.precision.compute_dtype), tokens)


@jax.jit
def nats(model: InferenceModel, h: Hidden, targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The losses of targets, from the residual stream after all blocks."""
    return token_scores(_normed(model, h), head_weight(model), targets)[0]


def _normed(model: InferenceModel, h: Hidden) -> Hidden:
    return rms_norm(h, _whole(model, model.final_norm), model.config.norm_eps)


def _whole(model: InferenceModel, weight: nnx.Variable) -> jax.Array:
    return gathered(weight, model.config.precision.compute_dtype)


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

    Rows that are not `is_active` [B] (default: all) keep their state; ignore their logits. A token
    outside the vocabulary, or beyond the `max_length` of full attention, gives NaN: raising would
    have to wait for every token. Raises `UserError` for tokens that are not int [B].
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
    is_plain, lengths = True if memory == "published" else None, is_active.astype(jnp.int32)
    hidden, state = advance(model, state, tokens[:, None], lengths, is_plain=is_plain)
    return hidden[:, 0], state


def check_memory(config: TransformerConfig, memory: MemoryMode) -> None:
    """Raises `UserError` for an unknown mode, or one that the model cannot have."""
    if memory not in get_args(MemoryMode):
        raise UserError(f"memory {memory!r} is not one of {', '.join(get_args(MemoryMode))}")
    if memory == "published" and not has_in_place_memory(config):
        raise UserError(
            "memory='published' switches in-place memories off while decoding, and a model of "
            f"method {config.method!r} has none: use 'kept'"
        )
