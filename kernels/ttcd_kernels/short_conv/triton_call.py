"""The convolved residual by the Triton kernels: launches, custom VJP, support."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ttcd_kernels import launch
from ttcd_kernels.normalize import NORM_EPS
from ttcd_kernels.partitioning import everywhere
from ttcd_kernels.short_conv.operands import Facts, Operands, Results
from ttcd_kernels.short_conv.tuning import Tile, Tuning, tuning_for

_MAX_TAPS = 8  # the backward keeps that many rows of both branches in registers


class _Shape(NamedTuple):
    """Static facts of a call."""

    facts: Facts
    tuning: Tuning


class Residuals(NamedTuple):
    """Residuals of the backward; of the student's convolution, only its key and norm."""

    operands: Operands  # taps [B, R, F] float32
    key: jax.Array | None  # [B, C, L, F], of a normalised key only
    norm: jax.Array | None  # [B, C, L] float32: |student|


def unsupported(x: Operands) -> str | None:
    """The reason why the kernels cannot take these arrays on this machine; None if they can."""
    taps = [taps.dtype.name for taps in (x.teacher_taps, x.student_taps)]
    if not set(taps) <= set(launch.DTYPES):
        return f"taps are {' and '.join(taps)}: they must be of {', '.join(launch.DTYPES)}"
    if x.teacher_taps.shape[0] > _MAX_TAPS:
        return f"{x.teacher_taps.shape[0]} taps are more than {_MAX_TAPS}"
    return launch.unsupported(launch.DTYPES, z_teacher=x.z_teacher, z_student=x.z_student)


def short_conv_residual(x: Operands, facts: Facts, tuning: Tuning | None = None) -> Results:
    """All three results of the call, for operands that are not `unsupported`; deterministic.
    Cotangents are summed in float32, gradients rounded once."""

    def per_row(taps: jax.Array) -> jax.Array:
        """Taps [B, R, F]: vmap may give every row of the batch its own."""
        return jnp.broadcast_to(taps.astype(jnp.float32), (x.z_teacher.shape[0], *taps.shape))

    x = x._replace(teacher_taps=per_row(x.teacher_taps), student_taps=per_row(x.student_taps))
    shape = _Shape(facts, tuning or tuning_for(launch.known_capability()))
    return cast(Results, _fused(shape, x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(shape: _Shape, x: Operands) -> Results:
    return _forward(shape, x)[0]


def _forward(shape: _Shape, x: Operands) -> tuple[Results, Residuals]:
    normalizes = shape.facts.normalizes_keys
    kinds = "ZZPPI -> ZZZI" if normalizes else "ZZPPI -> ZZZ"
    results = tuple(_everywhere(_launch_forward, kinds, shape, *x))
    key, norm = results[2:] if normalizes else (None, None)
    return results[:3], Residuals(x, key, norm)


def _backward(shape: _Shape, saved: Residuals, cotangents: Results) -> tuple[Operands]:
    facts = None, None, None
    if saved.key is not None and saved.norm is not None:
        facts = saved.key, *_row_facts(saved.key, saved.norm, cotangents[2], shape.facts.zero_slope)
    kinds = "ZZPPIZIIZZZ -> ZZGG"
    arrays = *saved.operands, *facts, *cotangents
    d_teacher, d_student, *d_taps = _everywhere(_launch_backward, kinds, shape, *arrays)
    return (Operands(d_teacher, d_student, d_taps[0].sum(1), d_taps[1].sum(1)),)


def _row_facts(
    key: jax.Array, norm: jax.Array, d_key: jax.Array, zero_slope: float
) -> tuple[jax.Array, jax.Array]:
    """(slope, along) [B, C, L] float32 of the gradient slope (d_key - along key) through the
    normalisation.

    The products are summed here, not in the kernel: a program there would read all features before
    it could form its first row, and repeat the rows that it shares with its neighbours.
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
    so are features unless the forward computes a norm."""
    whole = ("l", "f", "r") if kinds.endswith("ZZZI") else ("l", "r")
    return everywhere(functools.partial(function, shape), kinds, _AXES, arrays, whole)


def _launch_forward(shape: _Shape, *arrays: Any) -> list[jax.Array]:
    from ttcd_kernels.short_conv.triton_kernels import short_conv_residual_forward

    x = Operands(*arrays)
    B, C, L, _ = x.z_teacher.shape
    tile, normalizes = shape.tuning.forward, shape.facts.normalizes_keys
    result = jax.ShapeDtypeStruct(x.z_teacher.shape, x.z_teacher.dtype)
    norms = [jax.ShapeDtypeStruct((B, C, L), jnp.float32)] if normalizes else []
    return launch.launch(
        short_conv_residual_forward,
        *(*x[:4], _ids(x), C, L),
        out_shape=[result] * 3 + norms,
        grid=(-(-L // tile.block_l), C, B),
        **({} if norms else {"norm_ptr": None}),
        **_constants(shape, x, tile),
    )


def _launch_backward(shape: _Shape, *arrays: Any) -> tuple[jax.Array, ...]:
    """dz of both branches, and d_taps of both as sums over the tokens of a chunk; `arrays` are the
    operands, the key with its row facts, and the cotangents."""
    from ttcd_kernels.short_conv.triton_kernels import short_conv_residual_backward

    x = Operands(*arrays[:5])
    B, C, L, F = x.z_teacher.shape
    tile = shape.tuning.backward
    spans = -(-L // tile.block_l)
    dz = jax.ShapeDtypeStruct(x.z_teacher.shape, x.z_teacher.dtype)
    sums = jax.ShapeDtypeStruct((B, C, spans, x.teacher_taps.shape[1], F), jnp.float32)
    facts = arrays[5:8] if shape.facts.normalizes_keys else (x.z_student,) * 3
    *dz_both, teacher_sums, student_sums = launch.launch(
        short_conv_residual_backward,
        *(*x[:4], _ids(x), *facts, *arrays[8:], C, L),
        out_shape=[dz, dz, sums, sums],
        grid=(-(-F // tile.block_f) * spans, C, B),
        **_constants(shape, x, tile),
    )
    return *dz_both, teacher_sums.sum(2), student_sums.sum(2)


def _ids(x: Operands) -> jax.Array:
    """The ids; without segments a pointer that is never read."""
    return x.z_teacher if x.segment_ids is None else x.segment_ids.astype(jnp.int32)


def _constants(shape: _Shape, x: Operands, tile: Tile) -> dict[str, Any]:
    R, F = x.teacher_taps.shape[1:]
    return {
        "F": F,
        "R": R,
        "BEFORE": R - 1 if shape.facts.is_causal else R // 2,
        "BLOCK_L": tile.block_l,
        "BLOCK_F": tile.block_f,
        "HAS_SEGMENTS": x.segment_ids is not None,
        "NORMALIZES": shape.facts.normalizes_keys,
        "num_warps": tile.num_warps,
        "num_stages": 1,  # no products to feed, so nothing to pipeline
    }
