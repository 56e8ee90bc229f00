"""Memories that are a prefix sum over chunks, when the chunks of a row lie on several devices.

Each device sums what its own chunks write; the sums of the devices to the left, combined in order,
are the state in front of its part. One delta_w per device and layer is sent, however long the row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_jax.errors import UserError
from ttcd_jax.memory import prefix as scan
from ttcd_jax.memory.chunks import MemoryMask, memory_mask
from ttcd_jax.memory.prefix import MemoryRule
from ttcd_jax.sharding import rules, sequence


def part_mask(segment_ids: jax.Array | None, length: int, chunk_size: int) -> MemoryMask:
    """`memory_mask` of a device's own part of the row, `length` tokens."""
    previous = None if segment_ids is None else sequence.left_segment(segment_ids)
    return memory_mask(segment_ids, length, chunk_size, previous)


def check_parts(length: int, chunk_size: int) -> None:
    """Raises `UserError` when the parts of a row are not whole chunks."""
    parts = rules.axis_size("seq")
    if parts > 1 and length % (parts * chunk_size):
        raise UserError(
            f"a row of {length} tokens on {parts} devices of mesh axis seq is not {parts} times "
            f"whole chunks of {chunk_size}: its length must be a multiple of {parts * chunk_size}"
        )


def apply_memory(
    rule: MemoryRule,
    z: Float[Array, "B C L F"],
    keys: Float[Array, "B C L F"],
    errors: Float[Array, "B C L D"],
    w_base: Float[Array, "F D"],
    segment_ids: Int[Array, "B T"] | None,
    length: int,
) -> tuple[Float[Array, "B C L D"], Float[Array, " B"]]:
    """(y, |S|_F): `ttt.scan.apply_memory` on rows of `length` tokens wherever they lie, and the
    Frobenius norm of the state behind the row, which has no gradient."""
    chunk_size = z.shape[2]
    if not rules.is_distributed():
        mask = memory_mask(segment_ids, length, chunk_size)
        y, state = scan.apply_memory(rule, z, keys, errors, w_base, mask)
        return y, jnp.linalg.norm(_observed(state), axis=(-2, -1))
    check_parts(length, chunk_size)
    form = scan.chosen_form(rule, z.shape[1] * chunk_size, *w_base.shape)
    # F is cut only where no product sums over it and no norm runs over it.
    is_cut = form != "attention" and not rule.orthogonalizes
    features = "mlp" if is_cut else None
    rule = rule._replace(form=form)

    def on_part(z, keys, errors, w_base, segment_ids):
        mask = part_mask(segment_ids, length // sequence.num_parts(), chunk_size)
        has_left = sequence.num_parts() > 1
        start = _state_in_front(rule, keys, errors, mask) if has_left else None
        y, state = scan.apply_memory(rule, z, keys, errors, w_base, mask, start)
        square = jnp.sum(_observed(state) ** 2, axis=(-2, -1))
        square = jax.lax.psum(jnp.where(sequence.is_last(), square, 0), sequence.SEQ)
        if is_cut:
            y, square = jax.lax.psum((y, square), "tensor")
        return y, jnp.sqrt(square)

    chunks = ("batch", "length", None)
    run = rules.sharded(
        on_part,
        (
            (*chunks, features),
            (*chunks, features),
            (*chunks, None),
            (features, None),
            None if segment_ids is None else ("batch", "length"),
        ),
        ((*chunks, None), ("batch",)),
    )
    return run(z, keys, errors, w_base, segment_ids)


def _observed(state: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(state).astype(jnp.float32)


def _state_in_front(rule: MemoryRule, keys, errors, mask: MemoryMask) -> jax.Array:
    """S [B, F, D] of the devices to the left."""
    was_reset, total = scan.row_total(rule, keys, errors, mask)
    element = (was_reset, total)
    neutral = jax.tree.map(jnp.zeros_like, element)
    return sequence.exclusive_prefix(element, scan.segmented_sum, neutral)[1]
