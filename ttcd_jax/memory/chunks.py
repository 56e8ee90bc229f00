"""Sequences as chunks, and what a document boundary means for the memory. Nobody else reshapes
chunks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def num_chunks(length: int, chunk_size: int) -> int:
    return -(-length // chunk_size)


def to_chunks(x: Array, chunk_size: int) -> Array:
    """[B, T, ...] -> [B, C, L, ...], zero-padded at the end to whole chunks."""
    pad = -x.shape[1] % chunk_size
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])


def from_chunks(x: Array, length: int) -> Array:
    """[B, C, L, ...] -> [B, T, ...], the padding cut off."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


class MemoryMask(NamedTuple):
    """Who writes to and who reads from the memory. `None` stands for "everyone" (and "never").

    A token reads the updates of earlier chunks' tokens of its own document. Only a chunk's last
    document can reach the next chunk, so the prefix sum runs over one state per row, reset where
    that document is not the one the state belongs to.
    """

    # a real token of the chunk's last document
    writes: Bool[Array, "#B C L"] | None
    # the state in front of the chunk belongs to this token's document
    reads: Bool[Array, "B C L"] | None
    # the state in front of the chunk is dropped before it is added to
    resets: Bool[Array, "B C"] | None


def memory_mask(
    segment_ids: Int[Array, "B T"] | None,
    length: int,
    chunk_size: int,
    previous_segment: Int[Array, " B"] | None = None,
) -> MemoryMask:
    """The mask of a row of `length` tokens; every document of a row has a `segment_ids` value of
    its own. Without them the row is one document and only padding is masked. `previous_segment`:
    the segment in front of the row, which the initial state belongs to; default: the row's
    first."""
    is_ragged = length % chunk_size != 0
    real = to_chunks(jnp.ones((1, length), bool), chunk_size) if is_ragged else None
    if segment_ids is None:
        return MemoryMask(real, None, None)
    pad = -length % chunk_size
    ids = jnp.pad(segment_ids, ((0, 0), (0, pad)), mode="edge")
    ids = ids.reshape(ids.shape[0], -1, chunk_size)
    last = ids[:, :, -1]
    first = ids[:, 0, 0] if previous_segment is None else previous_segment
    previous = jnp.concatenate([first[:, None], last[:, :-1]], axis=1)
    writes = ids == last[:, :, None]
    return MemoryMask(
        writes if real is None else writes & real, ids == previous[:, :, None], last != previous
    )


def masked(
    x: Float[Array, "B C L X"], mask: Bool[Array, "#B C L"] | None
) -> Float[Array, "B C L X"]:
    """x with unmarked tokens set to zero."""
    return x if mask is None else jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))


def chunk_segments(segment_ids: jax.Array | None, chunk_size: int) -> jax.Array | None:
    """Segment ids [B, C, L] for what works inside chunks (the convolutions); padding gets id 0."""
    return None if segment_ids is None else to_chunks(segment_ids, chunk_size)


class ChunkedMemory(NamedTuple):
    """A memory met chunk by chunk, as two functions of its state: every token of a chunk reads what
    the chunks before it wrote, and a chunk is written when it is full. Trees carry the batch axis
    first, of any batch."""

    read: Callable[[Any, Any], jax.Array]  # (state, operands [B, T, ...]) -> y [B, T, ...]
    write: Callable[[Any, Any], Any]  # (state, operands of a chunk [B, L, ...]) -> state
