"""A memory along rows that arrive piece by piece.

Tokens read what full chunks wrote. The tokens of the open chunk write nothing yet: the operands of
their writes are stored (keys and errors, for example: delta_w in its low-rank form), and the token
that fills the chunk triggers the write, by the function that writes whole chunks in training. A
piece costs what its tokens cost in a long row; a single token touches one slot of the open chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ttcd_jax.memory.chunks import from_chunks, to_chunks
from ttcd_jax.memory.protocol import ChunkedMemory
from ttcd_jax.nn.row import Piece, scatter_from, where_rows
from ttcd_jax.sharding.rules import is_distributed


class OpenChunk(NamedTuple):
    """A memory in the middle of a row."""

    memory: Any  # the state that the full chunks wrote
    open: Any  # operands of the open chunk's write, [B, L, ...]

    def axes(self) -> "OpenChunk":
        """Logical axes: weights [B, F, D] sharded by rows and `mlp`, all else by rows."""

        def names(x: jax.Array) -> tuple[str | None, ...]:
            return ("batch", "mlp", None) if x.ndim == 3 else rows(x)

        def rows(x: jax.Array) -> tuple[str | None, ...]:
            return ("batch", *(None,) * (x.ndim - 1))

        return OpenChunk(jax.tree.map(names, self.memory), jax.tree.map(rows, self.open))

    def kinds(self) -> dict[str, Any]:
        return {"memory": self.memory, "open chunk": self.open}


def start_pieces(memory: ChunkedMemory, batch_size: int, chunk_size: int, writes: Any) -> OpenChunk:
    """The state before rows begin; `writes`: shapes of the operands of writes, [B, C, L, ...]."""
    return OpenChunk(
        memory.start(batch_size),
        jax.tree.map(lambda x: jnp.zeros((batch_size, chunk_size, *x.shape[3:]), x.dtype), writes),
    )


def over_piece(
    memory: ChunkedMemory, state: OpenChunk, reads: Any, writes: Any, piece: Piece
) -> tuple[jax.Array, OpenChunk]:
    """(y [B, T, ...], the state after the piece).

    `reads` and `writes`: trees of [B, T, ...]. `writes` may hold more positions than `reads`: the
    first few overwrite the provisional entries of the tokens just before the piece.
    """
    length = jax.tree.leaves(reads)[0].shape[1]
    chunk_size = jax.tree.leaves(state.open)[0].shape[1]
    piece.cut.check("chunk_size", chunk_size)
    if length <= chunk_size:
        return _inside_chunk(memory, state, reads, writes, piece)

    def one_chunk(state: OpenChunk, chunk: Any) -> tuple[OpenChunk, jax.Array]:
        reads, writes, offset = chunk
        inside = piece._replace(lengths=jnp.clip(piece.lengths - offset, 0, chunk_size))
        y, state = _inside_chunk(memory, state, reads, writes, inside)
        return state, y

    chunks = jax.tree.map(lambda x: jnp.moveaxis(to_chunks(x, chunk_size), 1, 0), (reads, writes))
    offsets = chunk_size * jnp.arange(length // chunk_size)
    state, y = jax.lax.scan(one_chunk, state, (*chunks, offsets))
    return from_chunks(jnp.moveaxis(y, 0, 1), length), state


def _inside_chunk(
    memory: ChunkedMemory, state: OpenChunk, reads: Any, writes: Any, piece: Piece
) -> tuple[jax.Array, OpenChunk]:
    y = memory.read(state.memory, reads)
    assert piece.phase is not None
    phase = piece.phase
    lead = jax.tree.leaves(writes)[0].shape[1] - jax.tree.leaves(reads)[0].shape[1]
    count = jnp.where(piece.lengths > 0, piece.lengths + lead, 0)
    chunk = jax.tree.map(
        lambda slots, new: scatter_from(slots, new, phase - lead, count), state.open, writes
    )
    chunk_size = jax.tree.leaves(chunk)[0].shape[1]
    is_full = (piece.lengths > 0) & (phase + piece.lengths == chunk_size)
    # The read before the write, which can then be in place: without the order XLA copies the state.
    y, before = jax.lax.optimization_barrier((y, state.memory))
    return y, OpenChunk(_written(is_full, memory, before, chunk), chunk)


def _written(is_full: Bool[Array, " B"], memory: ChunkedMemory, state: Any, chunk: Any) -> Any:
    """The state after a write in the rows whose chunk is full. One row at a time, because rows of
    a batch fill their chunks at different tokens, and most tokens fill none. On a mesh, whose
    devices share the rows, all rows at once; so for a single row, whose delta_w XLA would compute
    before a loop, at every token."""
    if is_distributed() or len(is_full) == 1:

        def all_rows(state: Any) -> Any:
            return where_rows(is_full, memory.write(state, chunk), state)

        return jax.lax.cond(is_full.any(), all_rows, lambda state: state, state)
    order = jnp.argsort(~is_full)

    def one_row(index: jax.Array, state: Any) -> Any:
        row = order[index]
        before, operands = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), (state, chunk)
        )
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, row, 0),
            state,
            memory.write(before, operands),
        )

    return jax.lax.fori_loop(0, is_full.sum(), one_row, state)


def inside_open_chunk(tail: Any, piece: Piece, chunk_size: int) -> Any:
    """Tails [B, R - 1, ...] after the piece, zero for tokens of full chunks."""
    assert piece.phase is not None
    count = (piece.phase + piece.lengths) % chunk_size

    def kept(tail: jax.Array) -> jax.Array:
        size = tail.shape[1]
        return where_rows(jnp.arange(size) >= size - count[:, None], tail, 0)

    return jax.tree.map(kept, tail)
