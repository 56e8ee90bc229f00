"""Public entry point of the convolved residual: shapes are checked here, before anything is
launched."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from ttcd_kernels.dispatch import Candidate, choose
from ttcd_kernels.short_conv import reference, triton_call, xla

Implementation = Literal["auto", "triton", "xla", "reference"]
# "auto" takes the first that can run.
CANDIDATES = {
    "triton": Candidate(triton_call.short_conv_residual, triton_call.unsupported),
    "xla": Candidate(xla.short_conv_residual),
    "reference": Candidate(reference.short_conv_residual, is_automatic=False),
}


def short_conv_residual(
    z_teacher: Float[Array, "B C L F"],
    z_student: Float[Array, "B C L F"],
    teacher_taps: Float[Array, "R F"],
    student_taps: Float[Array, "R F"],
    *,
    is_causal: bool,
    normalizes_keys: bool,
    zero_slope: float = 1.0,
    segment_ids: Int[Array, "B C L"] | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B C L F"], Float[Array, "B C L F"], Float[Array, "B C L F"]]:
    """What a chunk's error and key start from: (difference, target, key).

        target = conv(z_teacher, teacher_taps),  student = conv(z_student, student_taps)
        difference = target - student,  key = student / max(|student|, 1e-6) or student

    conv is depthwise inside a chunk: y_t = sum_r taps[r] z_{t - shift(r)}, a cross-correlation with
    zero padding at chunk edges. Causal: shift R-1-r, the last tap is the current token. Otherwise
    symmetric: shift R//2 - r. A tap that would reach another segment reads zero. Both convolutions
    are accumulated in float32 (float64 for float64) and rounded to z's dtype once; difference and
    key are made from the rounded values. Differentiable in z and taps; where |student| <= 1e-6 a
    normalised key has the gradient `zero_slope` times the identity. `implementation`: "triton" is
    one kernel forward and one backward for GPUs of compute capability 8.0 and up; "xla" composes
    them; "reference" is the definition; "auto" is the first of "triton" and "xla" that can run.

    Raises:
        ValueError: shapes that do not fit, naming both, or an implementation that cannot run.
    """
    _check_shapes(z_teacher, z_student, teacher_taps, student_taps, segment_ids)
    arrays = z_teacher, z_student, teacher_taps, student_taps
    run = choose("short convolution", implementation, CANDIDATES, *arrays)
    return run(*arrays, segment_ids, is_causal, normalizes_keys, zero_slope)


def _check_shapes(
    z_teacher: jax.Array,
    z_student: jax.Array,
    teacher_taps: jax.Array,
    student_taps: jax.Array,
    segment_ids: jax.Array | None,
) -> None:
    if z_teacher.shape != z_student.shape:
        raise ValueError(
            f"z_teacher has shape {z_teacher.shape} and z_student {z_student.shape}: "
            "they must be equal"
        )
    if teacher_taps.shape != student_taps.shape:
        raise ValueError(
            f"teacher_taps have shape {teacher_taps.shape} and student_taps "
            f"{student_taps.shape}: they must be equal; pad the shorter ones with zeros"
        )
    if teacher_taps.shape[-1] != z_teacher.shape[-1]:
        raise ValueError(
            f"taps {teacher_taps.shape} and z {z_teacher.shape} differ in the number of features"
        )
    if segment_ids is not None and segment_ids.shape != z_teacher.shape[:3]:
        raise ValueError(
            f"segment_ids {segment_ids.shape} must match the tokens, {z_teacher.shape[:3]}"
        )
