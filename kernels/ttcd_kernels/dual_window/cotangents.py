"""What every backward of dual-window attention starts from.

In the near band (distance < w_S) P_T = rho P_S with rho = exp(lse_S - lse_T) <= 1, so both outputs'
gradients pass through one set of weights:

    near:  dS = P_S * ((dO_S + rho dO_T) V^T - (D_S + rho D_T)),     dV += P_S^T (dO_S + rho dO_T)
    far:   dS = P_T * (dO_T V^T - D_T),                              dV += P_T^T dO_T

with D = rowsum(dO * O) - d_lse: five matrix products for each key pair of the teacher's window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Residuals(NamedTuple):
    """What the backward needs. Scores are recomputed."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, S, K, H]
    v: jax.Array
    segment_ids: jax.Array | None  # [B, S]
    teacher: jax.Array  # [B, T, N, H]
    student: jax.Array
    teacher_lse: jax.Array  # [B, T, N], float32 or float64
    student_lse: jax.Array


class BandCotangents(NamedTuple):
    """dO in q's dtype [B, T, N, H] and D in the dtype of the log-sum-exps [B, T, N], by band."""

    near_out: jax.Array
    near_delta: jax.Array
    far_out: jax.Array
    far_delta: jax.Array


def by_band(saved: Residuals, cotangents: tuple[jax.Array, ...]) -> BandCotangents:
    """From the cotangents of (teacher, student, teacher lse, student lse). The combined one of the
    near band is rounded to q's dtype once."""
    d_teacher, d_student, d_teacher_lse, d_student_lse = cotangents
    state = saved.teacher_lse.dtype

    def row_dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a.astype(state) * b.astype(state)).sum(-1)

    rho = jnp.exp(saved.student_lse - saved.teacher_lse)
    far_delta = row_dot(d_teacher, saved.teacher) - d_teacher_lse
    near_delta = row_dot(d_student, saved.student) - d_student_lse + rho * far_delta
    near_out = d_student.astype(state) + rho[..., None] * d_teacher.astype(state)
    return BandCotangents(near_out.astype(saved.q.dtype), near_delta, d_teacher, far_delta)
