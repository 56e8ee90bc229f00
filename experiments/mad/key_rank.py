"""The number of directions that the keys of a memory span: with few, its entries interfere."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.memory.chunks import from_chunks
from ttcd_jax.models.block import IPTTCDBlock, IPTTTBlock
from ttcd_jax.models.transformer import Transformer, place_of_layer


def effective_rank(x: Float[Array, "*rows F"]) -> Float[Array, ""]:
    """exp(entropy of p), p the singular values of x over their sum (Roy and Vetterli 2007): F for
    an orthogonal x, 1 for a single direction, and for a matrix of zeros."""
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.promote_types(x.dtype, jnp.float32))
    squares = jnp.linalg.eigvalsh(jnp.einsum("TF,TE->FE", flat, flat))
    # Rounding gives absent directions about eps of the largest square.
    floor = squares.max() * len(squares) * jnp.finfo(flat.dtype).eps
    sizes = jnp.sqrt(jnp.where(squares > floor, squares, 0))
    shares = sizes / jnp.maximum(sizes.sum(), jnp.finfo(flat.dtype).tiny)
    return jnp.exp(-jnp.sum(jnp.where(shares > 0, shares * jnp.log(jnp.maximum(shares, 1e-30)), 0)))


def key_ranks(model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, " fast_layers"] | None:
    """The effective rank of the keys of all tokens, of each in-place memory in layer order; None
    for a model without one. Costs a forward and an attention per memory."""
    h = model.embedding[...].astype(model.config.precision.compute_dtype)[tokens]
    embeddings, ranks = h, []
    for layer in range(model.config.num_layers):
        place = place_of_layer(model.config, layer)
        graph, params = nnx.split(getattr(model, place.group))
        unit = nnx.merge(graph, jax.tree.map(lambda x, row=place.row: x[row], params))
        block = getattr(unit, place.block)
        if isinstance(block, IPTTCDBlock | IPTTTBlock):
            ranks.append(effective_rank(from_chunks(block.keys(h), tokens.shape[1])))
        h = block(h, embeddings=embeddings)
    return jnp.stack(ranks) if ranks else None
