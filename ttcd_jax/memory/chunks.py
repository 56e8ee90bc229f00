"""Rows as chunks, and the masks that keep the documents of a row apart in a memory."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def to_chunks(x: Array, chunk_size: int, padding: str = "constant") -> Array:
    """[B, T, ...] -> [B, C, L, ...], padded at the end to whole chunks, as by `jnp.pad`."""
    pad = -x.shape[1] % chunk_size
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2), padding)
    return x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:])


def from_chunks(x: Array, length: int) -> Array:
    """[B, C, L, ...] -> [B, T, ...], the padding cut off."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def chunk_segments(
    segment_ids: Int[Array, "B T"] | None, chunk_size: int
) -> Int[Array, "B C L"] | None:
    """Segment ids by chunk; padding belongs to the row's last document."""
    return None if segment_ids is None else to_chunks(segment_ids, chunk_size, "edge")


class MemoryMask(NamedTuple):
    """Which tokens write to and read from a memory. `None` means "all" (for `resets`, "none"). A
    token reads the writes of its own document's tokens in earlier chunks. Only a chunk's last
    document can reach the next chunk, so there is one state per row, reset where that document is
    not the one the state belongs to."""

    # a token, not padding, of the chunk's last document
    writes: Bool[Array, "#B C L"] | None
    # the state before the chunk belongs to this token's document
    reads: Bool[Array, "B C L"] | None
    # the state before the chunk is dropped before the chunk is written
    resets: Bool[Array, "B C"] | None


def memory_mask(
    segments: Int[Array, "B C L"] | None,
    length: int,
    chunk_size: int,
    previous_segment: Int[Array, " B"] | None = None,
) -> MemoryMask:
    """The mask of rows of `length` tokens; every document of a row has its own segment id.
    Without ids a row is one document and only padding is masked. `previous_segment`: the id
    of the document that the initial state belongs to; default: the row's first."""
    num_chunks = -(-length // chunk_size)
    tokens = None
    if length % chunk_size:
        tokens = (jnp.arange(num_chunks * chunk_size) < length).reshape(1, num_chunks, chunk_size)
    if segments is None:
        return MemoryMask(tokens, None, None)
    last = segments[:, :, -1]
    first = segments[:, 0, 0] if previous_segment is None else previous_segment
    previous = jnp.concatenate([first[:, None], last[:, :-1]], axis=1)
    writes = segments == last[:, :, None]
    return MemoryMask(
        writes if tokens is None else writes & tokens,
        segments == previous[:, :, None],
        last != previous,
    )


def masked(x: Float[Array, "*mask X"], mask: Bool[Array, "..."] | None) -> Float[Array, "*mask X"]:
    """x, set to zero outside the mask, which has all axes of x but the last."""
    return x if mask is None else jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))
