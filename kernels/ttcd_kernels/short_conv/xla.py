"""Depthwise convolution inside a chunk with zero padding at its edges, and a chunk's residual
composed of two."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_kernels.normalize import l2_normalize
from ttcd_kernels.short_conv.reference import Facts, Operands, Results


def short_conv(
    x: Float[Array, "B C L F"],
    taps: Float[Array, "R F"],
    *,
    is_causal: bool,
    segment_ids: Int[Array, "B C L"] | None = None,
) -> Float[Array, "B C L F"]:
    """y_c = sum_r taps[r] x_{c - shift(r)}: a cross-correlation, no kernel flip.

    Causal: shift R-1-r, the last tap is the current token. Otherwise symmetric: shift R//2 - r. A
    tap that would reach another document reads zero. Accumulated in float32 or better, returned in
    x's dtype. The backward keeps x, not its R shifted copies.
    """
    convolve = functools.partial(_convolve, is_causal=is_causal)
    # Shifting x again costs nothing next to the products; where XLA merges both, nothing is lost.
    return jax.checkpoint(convolve, prevent_cse=False)(x, taps, segment_ids)


def _convolve(
    x: jax.Array, taps: jax.Array, segment_ids: jax.Array | None, *, is_causal: bool
) -> jax.Array:
    R, L = taps.shape[0], x.shape[2]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    before = R - 1 if is_causal else R // 2
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


def short_conv_residual(x: Operands, facts: Facts) -> Results:
    """Same contract as `reference.short_conv_residual`; the gradient of a key follows
    `l2_normalize`."""
    convolve = functools.partial(short_conv, is_causal=facts.is_causal, segment_ids=x.segment_ids)
    target, student = convolve(x.z_teacher, x.teacher_taps), convolve(x.z_student, x.student_taps)
    key = l2_normalize(student, facts.zero_slope) if facts.normalizes_keys else student
    return target - student, target, key
