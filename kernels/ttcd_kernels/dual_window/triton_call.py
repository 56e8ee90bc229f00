"""Dual-window attention by the Triton kernels: launches and support."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import launch
from ttcd_kernels.dual_window import tiles
from ttcd_kernels.dual_window.cotangents import QKV, by_kernels
from ttcd_kernels.dual_window.tuning import HEAD_DIMS, Tile, Tuning, tuning_for
from ttcd_kernels.launch import Operand
from ttcd_kernels.windows import Ids, Keys, Queries, Results, Windows


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
    static = windows.within(k.shape[1]), tuning
    forward = functools.partial(_launch_forward, *static)
    return by_kernels(forward, functools.partial(_launch_backward, *static), q, k, v, segment_ids)


def _launch_forward(windows: Windows, tuning: Tuning, q: Queries, *rest: Any) -> Results:
    """Of q, k, v and ids."""
    from ttcd_kernels.dual_window.triton_kernels import dual_window_forward

    B, T, N, _ = q.shape
    out, lse = _like(q), jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    # The kernel's scale is above 0.
    scale = abs(windows.scale) or 1.0
    if windows.scale <= 0:
        q = q * jnp.asarray(np.sign(windows.scale), q.dtype)
    by_query = dual_window_forward, windows, tuning.forward, tiles.key_tiles
    teacher, student, teacher_lse, student_lse = _launch(
        *by_query, (q, *rest), (), scale * launch.LOG2E, [out, out, lse, lse]
    )
    return teacher, student, teacher_lse.swapaxes(1, 2), student_lse.swapaxes(1, 2)


def _launch_backward(windows: Windows, tuning: Tuning, *arrays: Any) -> QKV:
    """dq, dk, dv from the arrays of `cotangents.backward_operands`."""
    from ttcd_kernels.dual_window import triton_kernels as kernels

    q, k, v, ids, near_out, near_delta, near_lse, far_out, far_delta, far_lse = arrays
    out, lse, delta = map(
        jnp.stack, ([near_out, far_out], [near_lse, far_lse], [near_delta, far_delta])
    )
    rows = lse.swapaxes(2, 3) * launch.LOG2E, delta.swapaxes(2, 3)  # [2, B, N, T]
    rest = (q, k, v, ids), (out, *rows, len(q)), windows.scale
    by_query = kernels.dual_window_backward_q, windows, tuning.backward_q, tiles.key_tiles
    by_key = kernels.dual_window_backward_kv, windows, tuning.backward_kv, tiles.query_tiles
    (dq,) = _launch(*by_query, *rest, [_like(q)])
    dk, dv = _launch(*by_key, *rest, [_like(k), _like(k)])
    return dq, dk, dv


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _launch(
    kernel: Any,
    windows: Windows,
    tile: Tile,
    tiles_of: Callable[..., jax.Array],
    operands: tuple[Any, ...],
    cotangents: tuple[Any, ...],
    scale: float,
    results: list[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """A program per tile, of those for which `tiles_of` lists what they visit, and head of the
    results; operands are q, k, v and ids."""
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
