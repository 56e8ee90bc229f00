"""Depthwise convolution inside a chunk with zero padding at its edges, and a chunk's residual
composed of two, in XLA on every device and as one Triton kernel each way."""

import functools
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_kernels import short_conv_call
from ttcd_kernels.dispatch import Candidate, choose
from ttcd_kernels.normalize import l2_normalize

Implementation = Literal["auto", "xla", "triton"]


def short_conv(
    x: Float[Array, "B C L F"],
    taps: Float[Array, "R F"],
    *,
    is_causal: bool,
    segment_ids: Int[Array, "B C L"] | None = None,
) -> Float[Array, "B C L F"]:
    """y_t = sum_r taps[r] x_{t - shift(r)} inside a chunk, a cross-correlation.

    Causal: shift R-1-r, the last tap is the current token. Otherwise symmetric: shift R//2 - r. A
    tap that would reach another segment reads zero. Accumulated in float32 (float64 for float64),
    rounded once. The backward keeps x, not R shifted copies.
    """
    return cast(jax.Array, _convolve(_before(taps, is_causal), x, taps, segment_ids))


def _before(taps: jax.Array, is_causal: bool) -> int:
    """The number of taps before that of the token itself."""
    return len(taps) - 1 if is_causal else len(taps) // 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(
    before: int, x: jax.Array, taps: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
    """y_t = sum_r taps[r] x_{t + r - before}, accumulated in float32 or wider."""
    _check(x, taps, segment_ids)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    moved = _moved(before, len(taps), x, segment_ids)
    terms = (x.astype(wide) * tap.astype(wide) for x, tap in zip(moved, taps, strict=True))
    return functools.reduce(jnp.add, terms).astype(x.dtype)


def _check(x: jax.Array, taps: jax.Array, segment_ids: jax.Array | None) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim != 4:
        raise ValueError(f"z is {x.dtype} {x.shape}: it must be float [B, C, L, F]")
    if taps.ndim != 2 or taps.shape[1] != x.shape[3] or not len(taps):
        raise ValueError(f"taps {taps.shape} and z {x.shape} differ in the number of features")
    if segment_ids is None:
        return
    dtype, shape = segment_ids.dtype, segment_ids.shape
    if not jnp.issubdtype(dtype, jnp.integer) or shape != x.shape[:3]:
        raise ValueError(
            f"segment_ids {dtype} {shape} must be int and match the tokens, {x.shape[:3]}"
        )


def _moved(
    before: int, num_taps: int, x: jax.Array, segment_ids: jax.Array | None
) -> list[jax.Array]:
    """x_{t + r - before} for every tap r, zero outside the chunk and in another segment: slices of
    one padded copy of x."""
    around = ((0, 0), (0, 0), (before, num_taps - 1 - before))
    padded, length = jnp.pad(x, (*around, (0, 0))), x.shape[2]
    moved = [padded[:, :, r : r + length] for r in range(num_taps)]
    if segment_ids is None:
        return moved
    ids = jnp.pad(segment_ids, around)
    is_same = (ids[:, :, r : r + length] == segment_ids for r in range(num_taps))
    return [jnp.where(mask[..., None], x, 0) for mask, x in zip(is_same, moved, strict=True)]


def _convolve_backward(before: int, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """dx is dy convolved with the taps in reverse order."""
    x, taps, segment_ids = saved
    # XLA would make the shifted copies before their use, and store them meanwhile.
    x, dy = jax.lax.optimization_barrier((x, dy))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dx = cast(jax.Array, _convolve(len(taps) - 1 - before, dy, taps[::-1], segment_ids))
    moved = _moved(before, len(taps), x, segment_ids)
    d_taps = jnp.stack([(x.astype(wide) * dy.astype(wide)).sum((0, 1, 2)) for x in moved])
    return dx.astype(x.dtype), d_taps.astype(taps.dtype), None


_convolve.defvjp(
    lambda before, *operands: (_convolve(before, *operands), operands), _convolve_backward
)


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

        target = short_conv(z_teacher, teacher_taps),  student = short_conv(z_student, student_taps)
        difference = target - student,  key = student / max(|student|, 1e-6) or student

    Difference and key start from the rounded convolutions. Differentiable in z and taps; where
    |student| <= 1e-6 a normalised key has the gradient `zero_slope` times the identity.
    `implementation`: "triton" is one kernel forward and one backward for GPUs of compute capability
    8.0 and up, with the numbers of "xla" but for the order of the sum in |student|; "auto" is
    "xla", until a GPU has timed both.

    Raises:
        ValueError: shapes that do not fit, naming both, or an implementation that cannot take them.
    """
    z, other = z_teacher.shape, z_student.shape
    if z != other:
        raise ValueError(f"z_teacher has shape {z} and z_student {other}: they must be equal")
    taps, other = teacher_taps.shape, student_taps.shape
    if taps != other:
        raise ValueError(
            f"teacher_taps have shape {taps} and student_taps {other}: they must be equal; "
            "pad the shorter ones with zeros"
        )
    operands = z_teacher, z_student, teacher_taps, student_taps, segment_ids
    _check(z_teacher, teacher_taps, segment_ids)
    run = choose("short convolution", implementation, CANDIDATES, *operands)
    before = _before(teacher_taps, is_causal)
    return run(before, zero_slope if normalizes_keys else None, *operands)


def _residual(before: int, zero_slope: float | None, *operands: Any) -> short_conv_call.Results:
    z_teacher, z_student, teacher_taps, student_taps, segment_ids = operands
    target = cast(jax.Array, _convolve(before, z_teacher, teacher_taps, segment_ids))
    student = cast(jax.Array, _convolve(before, z_student, student_taps, segment_ids))
    key = student if zero_slope is None else l2_normalize(student, zero_slope)
    return target - student, target, key


# "auto" takes the first.
CANDIDATES = {
    "xla": Candidate(_residual),
    "triton": Candidate(short_conv_call.residual, short_conv_call.unsupported),
}
