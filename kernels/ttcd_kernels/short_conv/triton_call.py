"""The convolved residual by the Triton kernels: launches, custom VJP, what they support."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ttcd_kernels import launch
from ttcd_kernels.normalize import NORM_EPS
from ttcd_kernels.partitioning import everywhere
from ttcd_kernels.short_conv.tuning import Tile, Tuning, tuning_for

_DTYPES = ("bfloat16", "float16", "float32")
_MAX_TAPS = 8  # the backward keeps that many rows of both branches in registers

type _Operand = jax.Array | jax.ShapeDtypeStruct
type _Results = tuple[jax.Array, jax.Array, jax.Array]


class _Shape(NamedTuple):
    """Static facts of a call."""

    is_causal: bool
    normalizes_keys: bool
    zero_slope: float
    tuning: Tuning


class Residuals(NamedTuple):
    """What the backward needs. The student's convolution is not kept: its key and norm are."""

    z_teacher: jax.Array  # [B, C, L, F]
    z_student: jax.Array
    teacher_taps: jax.Array  # [B, R, F] float32
    student_taps: jax.Array
    segment_ids: jax.Array | None  # [B, C, L]
    key: jax.Array | None  # [B, C, L, F], of a normalised key only
    norm: jax.Array | None  # [B, C, L] float32: |student|


def unsupported(
    z_teacher: _Operand, z_student: _Operand, teacher_taps: _Operand, student_taps: _Operand
) -> str | None:
    """Why the kernels cannot take these arrays on this machine; None if they can."""
    reason = launch.unfit_dtypes(_DTYPES, z_teacher=z_teacher, z_student=z_student)
    if reason is not None:
        return reason
    if not {teacher_taps.dtype.name, student_taps.dtype.name} <= set(_DTYPES):
        return (
            f"taps are {teacher_taps.dtype.name} and {student_taps.dtype.name}: they must be of "
            f"{', '.join(_DTYPES)}"
        )
    if teacher_taps.shape[0] > _MAX_TAPS:
        return f"{teacher_taps.shape[0]} taps are more than {_MAX_TAPS}"
    return launch.unavailable()


def short_conv_residual(
    z_teacher: jax.Array,
    z_student: jax.Array,
    teacher_taps: jax.Array,
    student_taps: jax.Array,
    segment_ids: jax.Array | None,
    is_causal: bool,
    normalizes_keys: bool,
    zero_slope: float,
    tuning: Tuning | None = None,
) -> _Results:
    """Same contract as `xla.short_conv_residual`, for operands that are not `unsupported`;
    deterministic. Cotangents are summed in float32, gradients rounded once."""
    if tuning is None:
        capability = launch.capability()
        assert capability is not None
        tuning = tuning_for(capability)

    def per_row(taps: jax.Array) -> jax.Array:
        """Taps [B, R, F]: vmap may give every row of the batch its own."""
        return jnp.broadcast_to(taps.astype(jnp.float32), (z_teacher.shape[0], *taps.shape))

    shape = _Shape(is_causal, normalizes_keys, zero_slope, tuning)
    taps = per_row(teacher_taps), per_row(student_taps)
    return cast(_Results, _fused(shape, z_teacher, z_student, *taps, segment_ids))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(
    shape: _Shape,
    z_teacher: jax.Array,
    z_student: jax.Array,
    teacher_taps: jax.Array,
    student_taps: jax.Array,
    segment_ids: jax.Array | None,
) -> _Results:
    operands = z_teacher, z_student, teacher_taps, student_taps, segment_ids
    return _forward(shape, *operands)[0]


def _forward(shape: _Shape, *operands: Any) -> tuple[_Results, Residuals]:
    kinds = "ZZPPI -> ZZZI" if shape.normalizes_keys else "ZZPPI -> ZZZ"
    results = tuple(_everywhere(_launch_forward, kinds, shape, *operands))
    key, norm = results[2:] if shape.normalizes_keys else (None, None)
    return results[:3], Residuals(*operands, key=key, norm=norm)


def _backward(shape: _Shape, saved: Residuals, cotangents: _Results) -> tuple[Any, ...]:
    facts = None, None, None
    if saved.key is not None and saved.norm is not None:
        facts = saved.key, *_row_facts(saved.key, saved.norm, cotangents[2], shape.zero_slope)
    dz_teacher, dz_student, *d_taps = _everywhere(
        _launch_backward, "ZZPPIZIIZZZ -> ZZGG", shape, *saved[:5], *facts, *cotangents
    )
    return dz_teacher, dz_student, *(taps.sum(1) for taps in d_taps), None


def _row_facts(
    key: jax.Array, norm: jax.Array, d_key: jax.Array, zero_slope: float
) -> tuple[jax.Array, jax.Array]:
    """(slope, along) [B, C, L] float32 of the gradient slope (d_key - along key) through the
    normalisation.

    The products are summed here and not in the kernel: a program there would have to pass all
    features before it could form its first row, and once more every row that it shares with its
    neighbours.
    """
    is_long = norm > NORM_EPS
    along = jnp.sum(key.astype(jnp.float32) * d_key.astype(jnp.float32), axis=-1)
    slope = jnp.where(is_long, 1 / jnp.where(is_long, norm, 1), zero_slope)
    return slope, jnp.where(is_long, along, 0)


_fused.defvjp(_forward, _backward)

# Axes of z-like arrays, taps, per-token arrays and the gradients of a chunk's taps.
_AXES = {"Z": "b c l f", "P": "b r f", "I": "b c l", "G": "b c r f"}


def _everywhere(
    function: Callable[..., Any], kinds: str, shape: _Shape, *arrays: jax.Array | None
) -> Any:
    """`function(shape, *arrays)` under vmap and on a mesh: batch and chunks are independent, and
    features where the forward needs no norm."""
    whole = ("l", "f", "r") if kinds.endswith("ZZZI") else ("l", "r")
    return everywhere(functools.partial(function, shape), kinds, _AXES, arrays, whole)


def _launch_forward(
    shape: _Shape,
    z_teacher: jax.Array,
    z_student: jax.Array,
    teacher_taps: jax.Array,
    student_taps: jax.Array,
    segment_ids: jax.Array | None,
) -> list[jax.Array]:
    from ttcd_kernels.short_conv.triton_kernels import short_conv_residual_forward

    B, C, L, _ = z_teacher.shape
    tile = shape.tuning.forward
    result = jax.ShapeDtypeStruct(z_teacher.shape, z_teacher.dtype)
    norms = [jax.ShapeDtypeStruct((B, C, L), jnp.float32)] if shape.normalizes_keys else []
    return launch.launch(
        short_conv_residual_forward,
        z_teacher,
        z_student,
        teacher_taps,
        student_taps,
        _ids(segment_ids, z_teacher),
        C,
        L,
        out_shape=[result] * 3 + norms,
        grid=(-(-L // tile.block_l), C, B),
        **({} if norms else {"norm_ptr": None}),
        **_constants(shape, teacher_taps, segment_ids, tile),
    )


class _BackwardOperands(NamedTuple):
    """Arrays of the backward kernel. `slope` and `along` are those of `_row_facts`."""

    z_teacher: jax.Array
    z_student: jax.Array
    teacher_taps: jax.Array
    student_taps: jax.Array
    segment_ids: jax.Array | None
    key: jax.Array | None
    slope: jax.Array | None
    along: jax.Array | None
    d_difference: jax.Array
    d_target: jax.Array
    d_key: jax.Array


def _launch_backward(shape: _Shape, *arrays: Any) -> tuple[jax.Array, ...]:
    """dz of both branches, and d_taps of both as sums over the tokens of a chunk."""
    from ttcd_kernels.short_conv.triton_kernels import short_conv_residual_backward

    x = _BackwardOperands(*arrays)
    B, C, L, F = x.z_teacher.shape
    tile = shape.tuning.backward
    spans = -(-L // tile.block_l)
    dz = jax.ShapeDtypeStruct(x.z_teacher.shape, x.z_teacher.dtype)
    sums = jax.ShapeDtypeStruct((B, C, spans, x.teacher_taps.shape[1], F), jnp.float32)
    facts = (x.key, x.slope, x.along) if shape.normalizes_keys else (x.z_student,) * 3
    *dz_both, teacher_sums, student_sums = launch.launch(
        short_conv_residual_backward,
        *x[:4],
        _ids(x.segment_ids, x.z_teacher),
        *facts,
        *x[8:],
        C,
        L,
        out_shape=[dz, dz, sums, sums],
        grid=(-(-F // tile.block_f) * spans, C, B),
        **_constants(shape, x.teacher_taps, x.segment_ids, tile),
    )
    return *dz_both, teacher_sums.sum(2), student_sums.sum(2)


def _ids(segment_ids: jax.Array | None, z: jax.Array) -> jax.Array:
    """Without segments a pointer that is never read replaces the ids."""
    return z if segment_ids is None else segment_ids.astype(jnp.int32)


def _constants(
    shape: _Shape, taps: jax.Array, segment_ids: jax.Array | None, tile: Tile
) -> dict[str, Any]:
    R, F = taps.shape[1:]
    return {
        "F": F,
        "R": R,
        "BEFORE": R - 1 if shape.is_causal else R // 2,
        "BLOCK_L": tile.block_l,
        "BLOCK_F": tile.block_f,
        "HAS_SEGMENTS": segment_ids is not None,
        "NORMALIZES": shape.normalizes_keys,
        "num_warps": tile.num_warps,
        "num_stages": 1,  # no products to feed, so nothing to pipeline
    }
