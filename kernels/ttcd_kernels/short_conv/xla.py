"""Depthwise convolution inside a chunk with zero padding at its edges, and a chunk's residual
composed of two."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_kernels.normalize import l2_normalize
from ttcd_kernels.short_conv.operands import Facts, Operands, Results


def short_conv(
    x: Float[Array, "B C L F"],
    taps: Float[Array, "R F"],
    *,
    is_causal: bool,
    segment_ids: Int[Array, "B C L"] | None = None,
) -> Float[Array, "B C L F"]:
    """The convolution of `api.short_conv_residual`. The backward keeps x, not R shifted copies."""
    R, L = taps.shape[0], x.shape[2]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    before = R - 1 if is_causal else R // 2

    # Shifting x again costs nothing next to the products; where XLA merges both, nothing is lost.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def convolve(x: jax.Array, taps: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        # Padded once and sliced per tap: one pass over x, forward and backward.
        around = ((0, 0), (0, 0), (before, R - 1 - before))
        padded = jnp.pad(x, (*around, (0, 0)))
        padded_ids = None if segment_ids is None else jnp.pad(segment_ids, around)
        total = jnp.zeros(x.shape, wide)
        for r in range(R):
            moved = padded[:, :, r : r + L]
            if padded_ids is not None and r != before:
                same = padded_ids[:, :, r : r + L] == segment_ids
                moved = jnp.where(same[..., None], moved, 0)
            total = total + moved.astype(wide) * taps[r].astype(wide)
        return total.astype(x.dtype)

    return convolve(x, taps, segment_ids)


def short_conv_residual(x: Operands, facts: Facts) -> Results:
    """All three results of the call; the gradient of a key follows `l2_normalize`."""
    convolve = functools.partial(short_conv, is_causal=facts.is_causal, segment_ids=x.segment_ids)
    target, student = convolve(x.z_teacher, x.teacher_taps), convolve(x.z_student, x.student_taps)
    key = l2_normalize(student, facts.zero_slope) if facts.normalizes_keys else student
    return target - student, target, key
