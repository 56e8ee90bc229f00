"""The definition of the convolutions inside chunks and of their residual: plain jnp, a loop over
taps, the compute dtype float32 or wider.

    y_t = sum_r taps[r] x_{t - shift(r)},    shift(r) = R-1-r (causal) or R//2 - r (symmetric)

with x = 0 outside the chunk and at tokens of another segment; each y is rounded to x's dtype.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ttcd_kernels.normalize import NORM_EPS

type Results = tuple[jax.Array, jax.Array, jax.Array]  # (difference, target, key) [B, C, L, F]


class Operands(NamedTuple):
    """Arrays of a call."""

    z_teacher: jax.Array  # [B, C, L, F]
    z_student: jax.Array
    teacher_taps: jax.Array  # [R, F]
    student_taps: jax.Array
    segment_ids: jax.Array | None = None  # [B, C, L]


class Facts(NamedTuple):
    """Static facts of a call."""

    is_causal: bool
    normalizes_keys: bool
    zero_slope: float = 1.0  # of a normalised key, where its vector is zero


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


def short_conv_residual(x: Operands, facts: Facts) -> Results:
    """(difference, target, key) in z's dtype. Gradients by autodiff, so right only where no student
    vector is zero: `zero_slope` applies there, and is not used here."""
    target = short_conv(x.z_teacher, x.teacher_taps, x.segment_ids, facts.is_causal)
    student = short_conv(x.z_student, x.student_taps, x.segment_ids, facts.is_causal)
    key = student
    if facts.normalizes_keys:
        wide = student.astype(jnp.promote_types(student.dtype, jnp.float32))
        norm = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
        key = (wide / jnp.maximum(norm, NORM_EPS)).astype(student.dtype)
    return target - student, target, key
