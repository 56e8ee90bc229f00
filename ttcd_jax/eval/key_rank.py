"""The number of directions that a memory's keys span: with few, its entries interfere."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.inference.model import inference_model
from ttcd_jax.memory.chunks import from_chunks, to_chunks
from ttcd_jax.methods.in_place import InPlaceConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.row import Row


def effective_rank(x: Float[Array, "*rows F"]) -> Float[Array, ""]:
    """exp(entropy of p), p the singular values of x over their sum (Roy and Vetterli 2007): F for
    an orthogonal x, 1 for a single direction, and for a matrix of zeros."""
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.promote_types(x.dtype, jnp.float32))
    squares = jnp.linalg.eigvalsh(jnp.einsum("TF,TE->FE", flat, flat))
    # Rounding gives absent directions about eps of the largest square.
    floor = squares.max() * len(squares) * jnp.finfo(flat.dtype).eps
    sizes = jnp.sqrt(jnp.where(squares > floor, squares, 0))
    shares = sizes / jnp.maximum(sizes.sum(), jnp.finfo(flat.dtype).tiny)
    return jnp.exp(jax.scipy.special.entr(shares).sum())


def key_ranks(model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, " fast_layers"] | None:
    """The effective rank of the keys of all tokens, of each in-slot memory in layer order; None
    for a model without one. Costs a forward and an attention per memory."""
    layers = inference_model(model)
    h = layers.embedding[...].astype(model.config.precision.compute_dtype)[tokens]
    row, ranks = Row.of(h, embeddings=h), []
    for graph, params in zip(layers.blocks, layers.layers, strict=True):
        block: Any = nnx.merge(graph, params)
        if isinstance(block.config.mlp, InPlaceConfig):
            ranks.append(effective_rank(_keys(block, h, row)))
        h, _ = block.forward(h, row)
    return jnp.stack(ranks) if ranks else None


def _keys(block: Any, h: Float[Array, "B T D"], row: Row) -> Float[Array, "B T F"]:
    """The keys under which the tokens are written."""
    x, student = block.inputs("mlp", h, row)
    mlp, size = block.mlp, block.mlp.settings.chunk_size
    tokens = mlp.tokens(x, mlp.source(x, row, student))
    chunks = jax.tree.map(lambda x: to_chunks(x, size), tokens)
    _, (keys, *_) = mlp.operands(mlp.convolved(chunks, None))
    return from_chunks(keys, h.shape[1])
