"""Rows that arrive piece by piece: what a piece is, and how a layer with a memory goes through it.

A memory is read through what full chunks wrote. The tokens of the open chunk write nothing yet:
what they will write is kept as they gave it (keys and errors, say: delta_w in its low-rank form),
and the token that fills the chunk sets off the very function that writes whole chunks in training.
A piece costs what the same tokens cost in a long row, and a single token touches one slot of the
open chunk.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ttcd_jax.memory.chunks import ChunkedMemory, from_chunks, to_chunks
from ttcd_jax.sharding.rules import is_distributed


class Piece(NamedTuple):
    """The next T places of every row, of which the first `lengths` are tokens and the rest is
    padding.

    A piece fits the chunks of the model's memories in one of two ways: no row has more tokens than
    its open chunk takes (T <= L), or every row that has any stands at the start of a chunk and T is
    a multiple of L.
    """

    start: Int[Array, " B"]  # position of a row's first token
    lengths: Int[Array, " B"]
    phase: Int[Array, " B"] | None  # tokens in the row's open chunk; None: no memory has chunks
    # Static: how many earlier positions the queries may look at, of all rows. One token (T = 1)
    # looks at all that is kept.
    halo: int
    has_gap: bool  # static: some row has fewer positions than that in front of it
    # Rows that pass in-place memories by; True: all do, and the memories are not even computed.
    is_plain: Bool[Array, " B"] | Literal[True] | None = None

    def positions(self, length: int) -> Int[Array, "B T"]:
        return self.start[:, None] + jnp.arange(length, dtype=jnp.int32)

    def is_token(self, length: int) -> Bool[Array, "B T"]:
        return jnp.arange(length) < self.lengths[:, None]


class Streamed(NamedTuple):
    """A memory in the middle of a row."""

    memory: Any  # what the full chunks wrote
    open: Any  # what the tokens of the open chunk will write, [B, L, ...]


def continued(
    memory: ChunkedMemory, state: Streamed, reads: Any, writes: Any, piece: Piece
) -> tuple[jax.Array, Streamed]:
    """(y [B, T, ...], the state behind the piece).

    `reads` and `writes`: trees of [B, T, ...]. `writes` may hold more places than `reads`: the ones
    in front replace what the last tokens before the piece put into the open chunk.
    """
    length = jax.tree.leaves(reads)[0].shape[1]
    chunk_size = jax.tree.leaves(state.open)[0].shape[1]
    if length <= chunk_size:
        return _inside_chunk(memory, state, reads, writes, piece)

    def one_chunk(state, chunk):
        reads, writes, offset = chunk
        inside = piece._replace(lengths=jnp.clip(piece.lengths - offset, 0, chunk_size))
        y, state = _inside_chunk(memory, state, reads, writes, inside)
        return state, y

    chunks = jax.tree.map(lambda x: jnp.moveaxis(to_chunks(x, chunk_size), 1, 0), (reads, writes))
    offsets = chunk_size * jnp.arange(length // chunk_size)
    state, y = jax.lax.scan(one_chunk, state, (*chunks, offsets))
    return from_chunks(jnp.moveaxis(y, 0, 1), length), state


def _inside_chunk(memory: ChunkedMemory, state: Streamed, reads, writes, piece: Piece):
    y = memory.read(state.memory, reads)
    assert piece.phase is not None
    phase = piece.phase
    lead = jax.tree.leaves(writes)[0].shape[1] - jax.tree.leaves(reads)[0].shape[1]

    def hold(slots: jax.Array, new: jax.Array) -> jax.Array:
        return placed(slots, new, phase - lead, given)

    given = jnp.where(piece.lengths > 0, piece.lengths + lead, 0)
    held = jax.tree.map(hold, state.open, writes)
    chunk_size = jax.tree.leaves(held)[0].shape[1]
    is_full = (piece.lengths > 0) & (phase + piece.lengths == chunk_size)
    return y, Streamed(_written(is_full, memory.write, state.memory, held), held)


def _written(is_full: Bool[Array, " B"], write, state, operands):
    """The state, written where a row's chunk is full. Row after row, and nothing where none is
    full: rows of a batch fill their chunks at different tokens. On a mesh, whose devices share the
    rows, all rows at once."""
    if is_distributed():

        def all_rows(state):
            new = write(state, operands)
            return jax.tree.map(lambda old, x: _where(is_full, x, old), state, new)

        return jax.lax.cond(is_full.any(), all_rows, lambda state: state, state)
    order = jnp.argsort(~is_full)

    def one_row(index, state):
        row = order[index]
        before, held = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), (state, operands)
        )
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, row, 0),
            state,
            write(before, held),
        )

    return jax.lax.fori_loop(0, is_full.sum(), one_row, state)


def placed(buffer: jax.Array, new: jax.Array, start: jax.Array, lengths: jax.Array) -> jax.Array:
    """buffer [B, W, ...] with the first `lengths` [B] of new [B, T, ...] in the slots from `start`
    [B] on; what falls outside is dropped."""
    place = jnp.arange(new.shape[1])
    slots = start[:, None] + place
    is_kept = (slots >= 0) & (place < lengths[:, None])
    return put(buffer, new, jnp.where(is_kept, slots, buffer.shape[1]))


def put(buffer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """buffer [B, W, ...] with new [B, T, ...] in `slots` [B, T]; a slot of W or more is
    dropped."""
    return jax.vmap(lambda row, new, slots: row.at[slots].set(new, mode="drop"))(buffer, new, slots)


def real(x: jax.Array, piece: Piece) -> jax.Array:
    """x [B, T, ...] with the padding set to zero."""
    return _where(piece.is_token(x.shape[1]), x, 0)


def with_tail(tail: jax.Array, x: jax.Array) -> jax.Array:
    """x [B, T, ...] behind the tokens in front of it: what a causal convolution needs."""
    return jnp.concatenate([tail, x], axis=1)


def next_tail(tail: jax.Array, x: jax.Array, piece: Piece) -> jax.Array:
    """The tail [B, R - 1, ...] behind the piece."""
    size = tail.shape[1]
    around = with_tail(tail, x)
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size))(
        around, piece.lengths
    )


def inside_open_chunk(tail: jax.Array, piece: Piece, chunk_size: int) -> jax.Array:
    """The tail [B, R - 1, ...] behind the piece, without tokens of chunks that are full."""
    assert piece.phase is not None
    held = (piece.phase + piece.lengths) % chunk_size
    size = tail.shape[1]
    return _where(jnp.arange(size) >= size - held[:, None], tail, 0)


def _where(mask: jax.Array, x: jax.Array, other: jax.Array | int) -> jax.Array:
    """x where `mask` says so, which has the first axes of x."""
    return jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, other)
