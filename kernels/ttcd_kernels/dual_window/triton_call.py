"""Dual-window attention by the Triton kernels: launches, custom VJP, what they support."""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import launch
from ttcd_kernels.batching import folds_batch
from ttcd_kernels.dual_window.cotangents import Residuals, by_band
from ttcd_kernels.dual_window.tuning import HEAD_DIMS, Tile, Tuning, tuning_for
from ttcd_kernels.partitioning import partitioned

_LOG2E = 1.4426950408889634
_DTYPES = ("bfloat16", "float16", "float32")

type _Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class _Shape(NamedTuple):
    """Static facts of a call."""

    teacher_window: int
    student_window: int
    scale: float
    tuning: Tuning


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> str | None:
    """Why the kernels cannot take these arrays on this machine; None if they can."""
    if q.shape[-1] not in HEAD_DIMS:
        return f"head dim {q.shape[-1]} is not one of {', '.join(map(str, HEAD_DIMS))}"
    return launch.unfit_dtypes(_DTYPES, q=q, k=k, v=v) or launch.unavailable()


def dual_window(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    teacher_window: int,
    student_window: int,
    scale: float,
    tuning: Tuning | None = None,
) -> _Results:
    """Same contract as `reference.dual_window`, for operands that are not `unsupported`;
    differentiable in q, k, v through all four results, deterministic. float32 operands are
    multiplied in full float32, not TF32."""
    shape = _shape(q, k, teacher_window, student_window, scale, tuning)
    return cast(_Results, _fused(shape, q, k, v, segment_ids))


def gradients(
    saved: Residuals,
    cotangents: tuple[jax.Array, ...],
    teacher_window: int,
    student_window: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv from the cotangents of the four results, whoever computed the results."""
    shape = _shape(saved.q, saved.k, teacher_window, student_window, scale, None)
    dq, dk, dv, _ = _backward(shape, saved, cotangents)
    return dq, dk, dv


def _shape(q, k, teacher_window: int, student_window: int, scale: float, tuning: Tuning | None):
    if tuning is None:
        capability = launch.capability()
        assert capability is not None
        tuning = tuning_for(capability, q.shape[-1])
    S = k.shape[1]
    return _Shape(min(teacher_window, S), min(student_window, S), scale, tuning)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(shape: _Shape, q, k, v, segment_ids):
    return _forward(shape, q, k, v, segment_ids)[0]


def _forward(shape: _Shape, q, k, v, segment_ids):
    results = everywhere(_launch_forward, "QKKI -> QQLL", shape, q, k, v, segment_ids)
    return results, Residuals(q, k, v, segment_ids, *results)


def _backward(shape: _Shape, saved: Residuals, cotangents):
    bands = by_band(saved, cotangents)
    near = bands.near_out, bands.near_delta, saved.student_lse
    far = bands.far_out, bands.far_delta, saved.teacher_lse
    operands = saved.q, saved.k, saved.v, saved.segment_ids
    dqkv = everywhere(_launch_backward, "QKKIQLLQLL -> QKK", shape, *operands, *near, *far)
    return *dqkv, None


# Axes of a query-like, key-like, row-statistic and id array: query heads are (k g).
_AXES = {"Q": "b t (k g) h", "K": "b s k h", "L": "b t (k g)", "I": "b s"}


def everywhere(function, kinds: str, shape: _Shape, *arrays):
    """`function(shape, *arrays)` under vmap and on a mesh: batch and kv heads are independent."""
    inputs, results = kinds.split(" -> ")
    present = [kind for kind, array in zip(inputs, arrays, strict=True) if array is not None]
    rule = " -> ".join(", ".join(_AXES[kind] for kind in part) for part in (present, results))
    group = arrays[0].shape[2] // arrays[1].shape[2]
    run = partitioned(functools.partial(function, shape), rule, whole=("t", "h", "s"), g=group)
    return folds_batch(run)(*arrays)


_fused.defvjp(_forward, _backward)


def _launch_forward(shape: _Shape, q, k, v, segment_ids):
    from ttcd_kernels.dual_window.triton_kernels import dual_window_forward

    B, T, N, _ = q.shape
    tile = shape.tuning.forward
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    lse = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    teacher, student, teacher_lse, student_lse = launch.launch(
        dual_window_forward,
        *_operands(q, k, v, segment_ids),
        *_sizes(q, k),
        shape.teacher_window,
        shape.student_window,
        np.float32(shape.scale * _LOG2E),
        out_shape=[out, out, lse, lse],
        grid=(-(-T // tile.block_m), N, B),
        **_constants(q, segment_ids, tile),
    )
    return teacher, student, teacher_lse.swapaxes(1, 2), student_lse.swapaxes(1, 2)


def _launch_backward(
    shape: _Shape,
    q,
    k,
    v,
    ids,
    near_out,
    near_delta,
    near_lse,
    far_out,
    far_delta,
    far_lse,
):
    from ttcd_kernels.dual_window.triton_kernels import (
        dual_window_backward_kv,
        dual_window_backward_q,
    )

    B, T, N, _ = q.shape
    S, K = k.shape[1:3]

    def stacked(near: jax.Array, far: jax.Array) -> jax.Array:
        """[2, B, N, T] from [B, T, N]."""
        return jnp.stack([near, far]).swapaxes(2, 3)

    arguments = (
        *_operands(q, k, v, ids),
        jnp.stack([near_out, far_out]),
        stacked(near_lse, far_lse),
        stacked(near_delta, far_delta),
        B,
        *_sizes(q, k),
        shape.teacher_window,
        shape.student_window,
        np.float32(shape.scale),
    )
    tile = shape.tuning.backward_q
    (dq,) = launch.launch(
        dual_window_backward_q,
        *arguments,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=(-(-T // tile.block_m), N, B),
        **_constants(q, ids, tile),
    )
    tile = shape.tuning.backward_kv
    dk, dv = launch.launch(
        dual_window_backward_kv,
        *arguments,
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
        grid=(-(-S // tile.block_n), K, B),
        **_constants(q, ids, tile),
    )
    return dq, dk, dv


def _operands(q, k, v, segment_ids) -> tuple[jax.Array, ...]:
    """Without documents a pointer that is never read stands for the ids."""
    return q, k, v, q if segment_ids is None else segment_ids.astype(jnp.int32)


def _sizes(q, k) -> tuple[int, ...]:
    """T, S, N, K."""
    return q.shape[1], k.shape[1], q.shape[2], k.shape[2]


def _constants(q, segment_ids, tile: Tile) -> dict[str, Any]:
    return {
        "H": q.shape[-1],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HAS_SEGMENTS": segment_ids is not None,
        "PRECISION": "ieee" if q.dtype == jnp.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
