"""A memory along rows, whole on one device or sharded along mesh axis `seq`.

An associative memory needs one summary per device and layer, however long the row: the exclusive
prefix of the summaries is the state before each device's part. Any other memory is a chain of
nonlinear updates: its state passes from device to device, and the devices take turns.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_jax.errors import UserError
from ttcd_jax.memory.protocol import ROWS, AssociativeMemory, Memory
from ttcd_jax.sharding import rules, sequence


def over_rows[W, S, P](
    memory: Memory[W, S, P],
    reads: Float[Array, "B ..."],
    writes: W,
    segments: Int[Array, "B ..."] | None,
    *,
    length: int,
    reports_size: bool = False,
) -> tuple[Float[Array, "B ..."], Float[Array, " B"] | None]:
    """(y, norm of the accumulated writes if `reports_size`, without gradient) of rows of `length`
    tokens. Operands and segments are [B, C, L, ...] for a memory with chunks, else [B, T, ...]."""
    axes = memory.axes()

    def on_shard(
        shard: rules.Shard, memory: Memory[W, S, P], reads: Array, writes: W, ids: Array | None
    ) -> tuple[Array, Array | None]:
        previous = None
        if ids is not None and shard.size(sequence.SEQ) > 1:
            previous = sequence.left_segment(shard, ids.reshape(len(ids), -1))
        shard_length = length // shard.size(sequence.SEQ)
        prepared = memory.prepared(
            reads, writes, ids, length=shard_length, previous_segment=previous
        )
        y, square = _along(shard, memory, prepared, reports_size)
        y = shard.sum(y, *axes.sums)
        if square is None:
            return y, None
        is_last = shard.index(sequence.SEQ) == shard.size(sequence.SEQ) - 1
        square = jnp.where(is_last, square, 0)
        return y, jnp.sqrt(shard.sum(square, sequence.SEQ, *axes.sums))

    outputs = (axes.y, ("batch",) if reports_size else ())
    inputs = (axes.memory, axes.reads, axes.writes, ROWS)
    return rules.sharded(on_shard, inputs, outputs)(memory, reads, writes, segments)


def _along[W, S, P](
    shard: rules.Shard, memory: Memory[W, S, P], prepared: P, reports_size: bool
) -> tuple[jax.Array, jax.Array | None]:
    """(y, `squared_size` at the end if `reports_size`) of this device's part of the row."""

    def advance(state: S | None, needs_end: bool = True) -> tuple[S, tuple[Array, Array | None]]:
        y, end = memory.row(prepared, state, needs_end=needs_end)
        size = jax.lax.stop_gradient(memory.squared_size(end)) if reports_size else None
        return end, (y, size)

    if shard.size(sequence.SEQ) == 1:
        return advance(None, needs_end=reports_size)[1]
    if isinstance(memory, AssociativeMemory):
        part = memory.summary(prepared)
        before = sequence.exclusive_prefix(shard, part, memory.combine, memory.neutral(part))
        return advance(before.added, needs_end=reports_size)[1]
    return sequence.passed_along(shard, advance, memory.start_of(prepared))[1]


def check_parts(length: int, chunk_size: int) -> None:
    """Raises `UserError` when a device's part of a row is not whole chunks."""
    parts = rules.axis_size("seq")
    if parts > 1 and length % (parts * chunk_size):
        raise UserError(
            f"a row of {length} tokens on {parts} devices of mesh axis seq is not {parts} times "
            f"whole chunks of {chunk_size}: its length must be a multiple of {parts * chunk_size}"
        )
