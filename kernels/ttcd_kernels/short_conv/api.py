"""Public entry point of the convolved residual, which checks the shapes."""

from typing import Literal

from jaxtyping import Array, Float, Int

from ttcd_kernels.dispatch import Candidate, choose
from ttcd_kernels.short_conv import triton_call, xla
from ttcd_kernels.short_conv.operands import Facts, Operands

Implementation = Literal["auto", "triton", "xla"]
# "auto" takes the first that can run.
CANDIDATES = {
    "triton": Candidate(triton_call.short_conv_residual, triton_call.unsupported),
    "xla": Candidate(xla.short_conv_residual),
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
    """The raw error, target and key of a chunk's tokens: (difference, target, key).

        target = conv(z_teacher, teacher_taps),  student = conv(z_student, student_taps)
        difference = target - student,  key = student / max(|student|, 1e-6) or student

    conv is depthwise inside a chunk: y_t = sum_r taps[r] z_{t - shift(r)}, a cross-correlation with
    zero padding at chunk edges. Causal: shift R-1-r, the last tap is the current token. Otherwise
    symmetric: shift R//2 - r. A tap that would reach another segment reads zero. Both convolutions
    are accumulated in float32 (float64 for float64) and rounded to z's dtype once; difference and
    key start from the rounded values. Differentiable in z and taps; where |student| <= 1e-6 a
    normalised key has the gradient `zero_slope` times the identity. `implementation`: "triton" is
    one kernel forward and one backward for GPUs of compute capability 8.0 and up; "xla" composes
    XLA operations; "auto" is the first of them that can run. Raises `ValueError` for shapes that do
    not fit, naming both, and for an implementation that cannot run.
    """
    x = Operands(z_teacher, z_student, teacher_taps, student_taps, segment_ids)
    _check_shapes(x)
    run = choose("short convolution", implementation, CANDIDATES, x)
    return run(x, Facts(is_causal, normalizes_keys, zero_slope))


def _check_shapes(x: Operands) -> None:
    z, taps = x.z_teacher.shape, x.teacher_taps.shape
    if z != x.z_student.shape:
        raise ValueError(
            f"z_teacher has shape {z} and z_student {x.z_student.shape}: they must be equal"
        )
    if taps != x.student_taps.shape:
        raise ValueError(
            f"teacher_taps have shape {taps} and student_taps {x.student_taps.shape}: "
            "they must be equal; pad the shorter ones with zeros"
        )
    if taps[-1] != z[-1]:
        raise ValueError(f"taps {taps} and z {z} differ in the number of features")
    if x.segment_ids is not None and x.segment_ids.shape != z[:3]:
        raise ValueError(f"segment_ids {x.segment_ids.shape} must match the tokens, {z[:3]}")
