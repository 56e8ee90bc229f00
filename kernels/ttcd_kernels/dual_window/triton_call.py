"""Dual-window attention by the Triton kernels: launches, custom VJP, support."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from ttcd_kernels import launch, partitioning
from ttcd_kernels.dual_window import tiles, xla
from ttcd_kernels.dual_window.cotangents import QKV, Residuals, by_band, with_gradients
from ttcd_kernels.dual_window.tuning import HEAD_DIMS, Tile, Tuning, tuning_for
from ttcd_kernels.launch import Operand
from ttcd_kernels.windows import Ids, Keys, Queries, Results, Windows


class _Shape(NamedTuple):
    """The static part of a call."""

    windows: Windows
    tuning: Tuning


def unsupported(q: Operand, k: Operand, v: Operand, *_: Any) -> str | None:
    """The reason why the kernels cannot take these arrays on this machine; None if they can."""
    return launch.unsupported(launch.DTYPES, HEAD_DIMS, q=q, k=k, v=v)


def dual_window(
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: Ids | None,
    windows: Windows,
    tuning: Tuning | None = None,
) -> Results:
    """All four results of the call, for operands that are not `unsupported`; differentiable through
    all of them, deterministic. float32 operands are multiplied as three products in TF32, whose
    sum is within some 2^-21 of the product."""
    shape = _shape(windows, q, k, tuning)
    return with_gradients(_forward, _backward, shape, q, k, v, segment_ids)


def gradients(windows: Windows, saved: Residuals, cotangents: Results) -> QKV:
    """dq, dk, dv from the cotangents of the four results, whichever implementation computed these:
    by the kernels, or in XLA where they cannot run."""
    if unsupported(saved.q, saved.k, saved.v) is not None:
        return xla.gradients(windows, saved, cotangents)
    return _backward(_shape(windows, saved.q, saved.k), saved, cotangents)


def _shape(windows: Windows, q: jax.Array, k: jax.Array, tuning: Tuning | None = None) -> _Shape:
    if tuning is None:
        tuning = tuning_for(launch.known_capability(q), q.shape[-1], q.dtype.itemsize)
    return _Shape(windows.within(k.shape[1]), tuning)


def _forward(
    shape: _Shape, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
) -> Results:
    return everywhere(_launch_forward, "QKKI -> QQLL", shape, q, k, v, segment_ids)


def _backward(shape: _Shape, saved: Residuals, cotangents: Results) -> QKV:
    return pulled(_launch_backward, shape, saved, cotangents)


def pulled(
    launch_backward: Callable[..., QKV], shape: Any, saved: Residuals, cotangents: Results
) -> QKV:
    """`launch_backward(shape, *backward_operands)` under vmap and on a mesh."""
    operands = backward_operands(saved, cotangents)
    return everywhere(launch_backward, "QKKIQLLQLL -> QKK", shape, *operands)


def backward_operands(
    saved: Residuals, cotangents: Results
) -> tuple[Shaped[Array, "..."] | None, ...]:
    """q, k, v, ids, then for the near and the far band dO [B, T, N, H], D and lse [B, T, N]."""
    bands = by_band(saved, cotangents)
    near = bands.near_out, bands.near_delta, saved.student_lse
    far = bands.far_out, bands.far_delta, saved.teacher_lse
    return saved.q, saved.k, saved.v, saved.segment_ids, *near, *far


# Axes of a query-like, key-like, row-statistic and id array.
_AXES = {"Q": "b t n h", "K": "b s k h", "L": "b t n", "I": "b s"}


def everywhere(
    function: Callable[..., Any], kinds: str, shape: Any, *arrays: Shaped[Array, "..."] | None
) -> Any:
    """`function(shape, *arrays)` under vmap and on a mesh: batch and kv heads are independent."""
    run = functools.partial(function, shape)
    return partitioning.everywhere(run, kinds, _AXES, arrays, whole=("t", "h", "s"))


def _launch_forward(
    shape: _Shape, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
) -> Results:
    from ttcd_kernels.dual_window.triton_kernels import dual_window_forward

    B, T, N, _ = q.shape
    tile = shape.tuning.forward
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    lse = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    # The kernel's scale is above 0.
    scale = abs(shape.windows.scale) or 1.0
    if shape.windows.scale <= 0:
        q = q * jnp.asarray(np.sign(shape.windows.scale), q.dtype)
    teacher, student, teacher_lse, student_lse = launch.launch(
        dual_window_forward,
        *_operands(shape, tile, tiles.key_tiles, q, k, v, segment_ids),
        *_sizes(q, k, shape.windows),
        np.float32(scale * launch.LOG2E),
        out_shape=[out, out, lse, lse],
        grid=(-(-T // tile.block_m), N, B),
        **_constants(q, segment_ids, tile),
    )
    return teacher, student, teacher_lse.swapaxes(1, 2), student_lse.swapaxes(1, 2)


def _launch_backward(shape: _Shape, *arrays: Any) -> QKV:
    """dq, dk, dv from the arrays of `backward_operands`."""
    from ttcd_kernels.dual_window.triton_kernels import (
        dual_window_backward_kv,
        dual_window_backward_q,
    )

    q, k, v, ids, near_out, near_delta, near_lse, far_out, far_delta, far_lse = arrays
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]

    def stacked(near: jax.Array, far: jax.Array) -> jax.Array:
        """[2, B, N, T] from [B, T, N]."""
        return jnp.stack([near, far]).swapaxes(2, 3)

    cotangents = (
        jnp.stack([near_out, far_out]),
        stacked(near_lse, far_lse) * launch.LOG2E,
        stacked(near_delta, far_delta),
        *(B, *_sizes(q, k, shape.windows), np.float32(shape.windows.scale)),
    )
    tile = shape.tuning.backward_q
    (dq,) = launch.launch(
        dual_window_backward_q,
        *_operands(shape, tile, tiles.key_tiles, q, k, v, ids),
        *cotangents,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid=(-(-T // tile.block_m), N, B),
        **_constants(q, ids, tile),
    )
    tile = shape.tuning.backward_kv
    dk, dv = launch.launch(
        dual_window_backward_kv,
        *_operands(shape, tile, tiles.query_tiles, q, k, v, ids),
        *cotangents,
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
        grid=(-(-S // tile.block_n), K, B),
        **_constants(q, ids, tile),
    )
    return dq, dk, dv


def _operands(
    shape: _Shape,
    tile: Tile,
    tiles_of: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """q, k, v, ids and tiles; without documents the ids are a pointer that is never read."""
    rows = None if segment_ids is None else tiles.documents(segment_ids)
    sizes = q.shape[1], k.shape[1], tile.block_m, tile.block_n
    return (
        q,
        k,
        v,
        q if rows is None else rows.ids,
        tiles_of(tiles.bands(shape.windows), *sizes, rows),
    )


def _sizes(q: jax.Array, k: jax.Array, windows: Windows) -> tuple[int, ...]:
    """T, S, N, K, w_T, w_S."""
    return q.shape[1], k.shape[1], q.shape[2], k.shape[2], windows.teacher, windows.student


def _constants(q: jax.Array, segment_ids: jax.Array | None, tile: Tile) -> dict[str, Any]:
    return {
        "H": q.shape[-1],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "HAS_SEGMENTS": segment_ids is not None,
        "PRECISION": "tf32x3" if q.dtype == jnp.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
