"""Dual-window attention by the Triton kernels: launches and support."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import launch
from ttcd_kernels.dual_window import tiles
from ttcd_kernels.dual_window.cotangents import QKV, by_kernels
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
    tuning = tuning or tuning_for(launch.known_capability(q), q.shape[-1], q.dtype.itemsize)
    shape = _Shape(windows.within(k.shape[1]), tuning)
    forward = functools.partial(_launch_forward, shape)
    backward = functools.partial(_launch_backward, shape)
    return by_kernels(forward, backward, q, k, v, segment_ids)


def _launch_forward(
    shape: _Shape, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
) -> Results:
    from ttcd_kernels.dual_window.triton_kernels import dual_window_forward

    (B, T, N, _), (windows, tuning) = q.shape, shape
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    lse = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    # The kernel's scale is above 0.
    scale = abs(windows.scale) or 1.0
    if windows.scale <= 0:
        q = q * jnp.asarray(np.sign(windows.scale), q.dtype)
    by_query = dual_window_forward, windows, tuning.forward, tiles.key_tiles
    teacher, student, teacher_lse, student_lse = _launch(
        *by_query, (q, k, v, segment_ids), (), scale * launch.LOG2E, [out, out, lse, lse]
    )
    return teacher, student, teacher_lse.swapaxes(1, 2), student_lse.swapaxes(1, 2)


def _launch_backward(shape: _Shape, *arrays: Any) -> QKV:
    """dq, dk, dv from the arrays of `cotangents.backward_operands`."""
    from ttcd_kernels.dual_window import triton_kernels as kernels

    q, k, v, ids, near_out, near_delta, near_lse, far_out, far_delta, far_lse = arrays
    windows, tuning = shape

    def stacked(near: jax.Array, far: jax.Array) -> jax.Array:
        """[2, B, N, T] from [B, T, N]."""
        return jnp.stack([near, far]).swapaxes(2, 3)

    cotangents = (
        jnp.stack([near_out, far_out]),
        stacked(near_lse, far_lse) * launch.LOG2E,
        stacked(near_delta, far_delta),
        len(q),
    )
    rest = (q, k, v, ids), cotangents, windows.scale
    of_q, of_k = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k))
    by_query = kernels.dual_window_backward_q, windows, tuning.backward_q, tiles.key_tiles
    by_key = kernels.dual_window_backward_kv, windows, tuning.backward_kv, tiles.query_tiles
    (dq,) = _launch(*by_query, *rest, [of_q])
    dk, dv = _launch(*by_key, *rest, [of_k, of_k])
    return dq, dk, dv


def _launch(
    kernel: Any,
    windows: Windows,
    tile: Tile,
    tiles_of: Callable[..., jax.Array],
    operands: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    cotangents: tuple[Any, ...],
    scale: float,
    results: list[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """A program per tile, of those for which `tiles_of` lists what they visit, and head of the
    results."""
    q, k, v, segment_ids = operands
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    rows = None if segment_ids is None else tiles.documents(segment_ids)
    visited = tiles_of(tiles.bands(windows), T, S, tile.block_m, tile.block_n, rows)
    return launch.launch(
        kernel,
        *(q, k, v),
        q if rows is None else rows.ids,  # without documents a pointer that is never read
        visited,
        *cotangents,
        *(T, S, N, K, windows.teacher, windows.student),
        np.float32(scale),
        out_shape=results,
        grid=(visited.shape[1], results[0].shape[2], B),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        H=H,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        HAS_SEGMENTS=rows is not None,
        PRECISION="tf32x3" if q.dtype == jnp.float32 else "tf32",
    )
