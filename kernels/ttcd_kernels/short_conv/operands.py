"""The types of the convolved residual: arrays and static facts of a call, results."""

from typing import NamedTuple

import jax

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
