"""The forward pass of inference: the model on the next piece of every row."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.state import InferenceState
from ttcd_jax.models.config import memory_chunk
from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.nn.row import Cut, Hidden, Piece
from ttcd_jax.sharding.rules import constrain, gathered
from ttcd_jax.sharding.vocabulary import lookup


def advance(
    model: InferenceModel,
    state: InferenceState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    halo: int,
    has_gap: bool,
    is_plain: Bool[Array, " B"] | Literal[True] | None = None,
) -> tuple[Hidden, InferenceState]:
    """(final normed hidden states, state after the piece) of the next tokens of every row.

    The first `lengths` of a row's T positions are tokens, the others padding; a row of length 0
    keeps its state. `nn.row.Piece` defines which pieces fit the chunks of memories. `halo`: earlier
    positions that attention reads (the window less one, or all read so far); `has_gap`: whether
    some row has read fewer. T = 1 fits any state and needs no halo. `is_plain`: rows whose in-place
    memories are neither read nor written, as in published decoding; True: all rows.
    """
    chunk_size, dtype = memory_chunk(model.config), model.config.precision.compute_dtype
    phase = None if chunk_size is None else (state.position - state.chunk_start) % chunk_size
    h, layers = lookup(_whole(model, model.embedding).astype(dtype), tokens), []
    cut = Cut(chunk_size, model.config.window)
    piece = Piece(state.position, lengths, phase, halo, has_gap, is_plain, h, cut)
    for graph, params, before in zip(model.blocks, model.layers, state.layers, strict=True):
        params = jax.tree.map(
            lambda weight: weight.replace(_whole(model, weight)),
            params,
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )
        h, after = nnx.merge(graph, params).extend(h, piece, before)
        h = constrain(h, "batch", "length", None)
        layers.append(after)
    hidden = rms_norm(h, _whole(model, model.final_norm), model.config.norm_eps)
    state = state._replace(position=state.position + lengths, layers=tuple(layers))
    return hidden, state


def head_logits(
    model: InferenceModel, hidden: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
    """Logits of final hidden states, in the compute dtype."""
    return jnp.einsum("...D,VD->...V", hidden, head_weight(model).astype(hidden.dtype))


def head_weight(model: InferenceModel) -> Float[Array, "V D"]:
    return _whole(model, model.head)


def _whole(model: InferenceModel, weight: nnx.Variable) -> jax.Array:
    return gathered(weight, model.config.precision.compute_dtype)
