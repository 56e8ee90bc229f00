"""A memory along rows that arrive piece by piece.

A memory that reads its own chunk is written at once. Of any other, tokens read the writes of full
chunks; the operands of the open chunk's writes are stored (keys and errors, for example: delta_w in
its low-rank form) until the token that fills it triggers the write, by the function of training. A
single token touches one slot of the open chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.memory.chunks import MemoryMask, from_chunks, to_chunks
from ttcd_jax.memory.protocol import ChunkedMemory, Chunks
from ttcd_jax.nn.row import Piece, scatter_from, where_rows
from ttcd_jax.sharding.rules import Names, is_distributed


@struct.dataclass
class OpenChunk[Writes, State]:
    """A memory in the middle of a row."""

    memory: State  # that the full chunks wrote
    open: Writes | None  # operands of the open chunk's write, [B, L, ...]; None: nothing writes

    def axes(self) -> "OpenChunk":
        """Logical axes: weights [B, F, D] sharded by rows and `mlp`, all else by rows."""

        def names(axis: str | None, x: jax.Array | jax.ShapeDtypeStruct) -> Names:
            return ("batch", axis, None) if x.ndim == 3 else ("batch", *(None,) * (x.ndim - 1))

        memory = jax.tree.map(functools.partial(names, "mlp"), self.memory)
        return OpenChunk(memory, jax.tree.map(functools.partial(names, None), self.open))

    def kinds(self) -> dict[str, object]:
        return {"memory": self.memory, "open chunk": self.open}


def start_pieces[W, S](memory: ChunkedMemory[W, S], batch_size: int, writes: W) -> OpenChunk[W, S]:
    """The state before rows begin; `writes`: shapes of the operands of a chunk's, [B, L, ...]."""
    stored: Any = () if memory.reads_own_chunk else writes
    return OpenChunk(memory.start(batch_size), jax.tree.map(jnp.zeros_like, stored))


def over_piece[W, S](
    memory: ChunkedMemory[W, S],
    state: OpenChunk[W, S],
    reads: Float[Array, "B T ..."],
    writes: W,
    piece: Piece,
    chunk_size: int,
) -> tuple[Float[Array, "B T ..."], OpenChunk[W, S]]:
    """(y, the state after the piece). `writes`, arrays [B, T, ...], may hold more positions than
    `reads`: the first few overwrite the provisional entries of the tokens just before the piece."""
    if state.open is None:
        return memory.read(state.memory, reads), state
    length = reads.shape[1]
    if memory.reads_own_chunk:
        by_chunk = functools.partial(to_chunks, chunk_size=min(length, chunk_size))
        operands = reads, writes, piece.is_token(length)
        reads, writes, mask = jax.tree.map(by_chunk, operands)
        y, end = memory.row(Chunks(reads, writes, MemoryMask(mask, None, None)), state.memory)
        return from_chunks(y, length), OpenChunk(end, state.open)
    piece.cut.check("chunk_size", chunk_size)
    if length <= chunk_size:
        return _inside_chunk(memory, state, reads, writes, piece)

    def one_chunk(
        state: OpenChunk[W, S], chunk: tuple[Array, W, Array]
    ) -> tuple[OpenChunk[W, S], Array]:
        reads, writes, offset = chunk
        inside = piece._replace(lengths=jnp.clip(piece.lengths - offset, 0, chunk_size))
        y, state = _inside_chunk(memory, state, reads, writes, inside)
        return state, y

    chunks = jax.tree.map(lambda x: jnp.moveaxis(to_chunks(x, chunk_size), 1, 0), (reads, writes))
    offsets = chunk_size * jnp.arange(length // chunk_size)
    state, y = jax.lax.scan(one_chunk, state, (*chunks, offsets))
    return from_chunks(jnp.moveaxis(y, 0, 1), length), state


def closed[W, S](memory: ChunkedMemory[W, S], state: OpenChunk[W, S], count: Int[Array, " B"]) -> S:
    """The memory of rows that end here: the `count` tokens of an open chunk are written too."""
    if state.open is None or not (stored := jax.tree.leaves(state.open)):
        return state.memory  # they are, or nothing writes
    mask = jnp.arange(stored[0].shape[1]) < count[:, None]
    return where_rows(count > 0, memory.write(state.memory, state.open, mask), state.memory)


def _inside_chunk[W, S](
    memory: ChunkedMemory[W, S], state: OpenChunk[W, S], reads: Array, writes: W, piece: Piece
) -> tuple[Array, OpenChunk[W, S]]:
    y, phase = memory.read(state.memory, reads), piece.phase
    assert phase is not None
    lead = jax.tree.leaves(writes)[0].shape[1] - reads.shape[1]
    count = jnp.where(piece.lengths > 0, piece.lengths + lead, 0)
    chunk = jax.tree.map(
        lambda slots, new: scatter_from(slots, new, phase - lead, count), state.open, writes
    )
    chunk_size = jax.tree.leaves(chunk)[0].shape[1]
    is_full = (piece.lengths > 0) & (phase + piece.lengths == chunk_size)
    # The read before the write, which can then be in place: without the order XLA copies the state.
    y, before = jax.lax.optimization_barrier((y, state.memory))
    return y, OpenChunk(_written(is_full, memory, before, chunk), chunk)


def _written[W, S](
    is_full: Bool[Array, " B"], memory: ChunkedMemory[W, S], state: S, chunk: W
) -> S:
    """The state after a write in the rows whose chunk is full: one row at a time, because rows of a
    batch fill their chunks at different tokens. On a mesh, whose devices share the rows, all at
    once; so a single row, whose delta_w XLA would compute before a loop, at every token."""
    if is_distributed() or len(is_full) == 1:

        def all_rows(state: S) -> S:
            return where_rows(is_full, memory.write(state, chunk), state)

        return jax.lax.cond(is_full.any(), all_rows, lambda state: state, state)
    order = jnp.argsort(~is_full)

    def one_row(index: jax.Array, state: S) -> S:
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


def inside_open_chunk[Tail](tail: Tail, piece: Piece, chunk_size: int) -> Tail:
    """Tails [B, R - 1, ...] after the piece, if there are any, zero for tokens of full chunks."""
    if tail is None:
        return tail
    assert piece.phase is not None
    count = (piece.phase + piece.lengths) % chunk_size
    size = jax.tree.leaves(tail)[0].shape[1]
    return where_rows(jnp.arange(size) >= size - count[:, None], tail)
