"""The definition of the convolutions inside chunks and what is made of them: plain jnp, a loop over
taps, the compute dtype float32 or wider.

    y_t = sum_r taps[r] x_{t - shift(r)},    shift(r) = R-1-r (causal) or R//2 - r (symmetric)

with x = 0 outside of the chunk and at tokens of another segment; each y is rounded to x's dtype.
"""

import jax
import jax.numpy as jnp

from ttcd_kernels.normalize import NORM_EPS


def short_conv(
    x: jax.Array, taps: jax.Array, segment_ids: jax.Array | None, is_causal: bool
) -> jax.Array:
    """x [B, C, L, F], taps [R, F], segment_ids [B, C, L] -> y [B, C, L, F]."""
    R, L = taps.shape[0], x.shape[2]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.zeros(x.shape, wide)
    for r in range(R):
        source = jnp.arange(L) - ((R - 1 if is_causal else R // 2) - r)
        is_read = (source >= 0) & (source < L)
        source = source.clip(0, L - 1)
        if segment_ids is not None:
            is_read = is_read & (segment_ids[:, :, source] == segment_ids)
        moved = jnp.where(is_read[..., None], x[:, :, source], 0)
        y = y + moved.astype(wide) * taps[r].astype(wide)
    return y.astype(x.dtype)


def short_conv_residual(
    z_teacher: jax.Array,
    z_student: jax.Array,
    teacher_taps: jax.Array,
    student_taps: jax.Array,
    segment_ids: jax.Array | None,
    is_causal: bool,
    normalizes_keys: bool,
    zero_slope: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(difference, target, key) [B, C, L, F] in z's dtype. Gradients by autodiff, so right only
    where no student vector is zero: `zero_slope` rules those, and is not used here."""
    target = short_conv(z_teacher, teacher_taps, segment_ids, is_causal)
    student = short_conv(z_student, student_taps, segment_ids, is_causal)
    key = student
    if normalizes_keys:
        wide = student.astype(jnp.promote_types(student.dtype, jnp.float32))
        norm = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
        key = (wide / jnp.maximum(norm, NORM_EPS)).astype(student.dtype)
    return target - student, target, key
