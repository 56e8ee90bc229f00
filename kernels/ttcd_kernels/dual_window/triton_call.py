"""Dual-window attention by the Triton kernels: launches and support."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import launch
from ttcd_kernels.dual_window import tiles
from ttcd_kernels.dual_window.cotangents import GRADIENTS, QKV, by_kernels
from ttcd_kernels.dual_window.tuning import HEAD_DIMS, Tile, Tuning, tuning_for
from ttcd_kernels.launch import Operand
from ttcd_kernels.partitioning import everywhere
from ttcd_kernels.windows import Ids, Keys, Queries, Results, Windows


def unsupported(q: Operand, k: Operand, v: Operand, *_: Any) -> str | None:
    """The reason why the kernels cannot take these arrays on this machine; None if they can."""
    return launch.unsupported(launch.DTYPES, HEAD_DIMS, q=q, k=k, v=v)


def dual_window(q: Queries, k: Keys, v: Keys, segment_ids: Ids | None, windows: Windows) -> Results:
    """All four results of the call, for operands that are not `unsupported`; differentiable through
    all of them, deterministic. float32 operands are multiplied as three products in TF32, whose
    sum is within some 2^-21 of the product."""
    forward = functools.partial(_launch_forward, windows, _tuning(q))
    backward = functools.partial(_launch_backward, windows, _tuning(q))
    return by_kernels(forward, backward, q, k, v, segment_ids)


def gradients(windows: Windows, *arrays: Any) -> QKV:
    """dq, dk, dv from the arrays of `cotangents.backward_operands`, whatever the forward was."""
    backward = functools.partial(_launch_backward, windows, _tuning(arrays[0]))
    return everywhere(backward, GRADIENTS, *arrays)


def _tuning(q: Operand) -> Tuning:
    return tuning_for(launch.known_capability(q), q.shape[-1], q.dtype.itemsize)


def _launch_forward(windows: Windows, tuning: Tuning, *operands: Any) -> Results:
    """Of q, k, v and ids."""
    results = launch_kernel("forward", windows, tuning.forward, *operands)
    teacher, student, teacher_lse, student_lse = results
    return teacher, student, teacher_lse.swapaxes(1, 2), student_lse.swapaxes(1, 2)


def _launch_backward(windows: Windows, tuning: Tuning, *arrays: Any) -> QKV:
    """dq, dk, dv from the arrays of `cotangents.backward_operands`."""
    operands, near, far = arrays[:4], arrays[4:7], arrays[7:]
    out, delta, lse = map(jnp.stack, zip(near, far, strict=True))
    operands += out, lse.swapaxes(2, 3) * launch.LOG2E, delta.swapaxes(2, 3)
    (dq,) = launch_kernel("backward_q", windows, tuning.backward_q, *operands)
    dk, dv = launch_kernel("backward_kv", windows, tuning.backward_kv, *operands)
    return dq, dk, dv


def launch_kernel(
    name: str,
    windows: Windows,
    tile: Tile,
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: Ids | None,
    *cotangents: jax.Array,
) -> list[jax.Array]:
    """The results of one kernel (a field of `Tuning`), log-sum-exps as [B, N, T], for windows no
    longer than the keys. Cotangents, for the gradients: of both bands, near first, dO [2, B, T, N,
    H], the log-sum-exp in base 2 and D [2, B, N, T]."""
    from ttcd_kernels.dual_window import triton_kernels

    (B, T, N, H), (S, K), scale = q.shape, k.shape[1:3], windows.scale
    rows = None if segment_ids is None else tiles.documents(segment_ids)
    sizes, by_key = (T, S, tile.block_m, tile.block_n), name == "backward_kv"
    visited = tiles.visits(tiles.bands(windows), *sizes, rows, by_key=by_key)
    like_q, like_k = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k))
    results = {"backward_q": [like_q], "backward_kv": [like_k, like_k]}.get(name)
    if results is None:
        results = [like_q] * 2 + [jax.ShapeDtypeStruct((B, N, T), jnp.float32)] * 2
        if scale <= 0:  # the kernel's is above 0
            q = q * jnp.asarray(np.sign(scale), q.dtype)
        scale = (abs(scale) or 1.0) * launch.LOG2E
    return launch.launch(
        getattr(triton_kernels, f"dual_window_{name}"),
        *(q, k, v),
        q if rows is None else rows.ids,  # without documents a pointer that is never read
        visited,
        *((*cotangents, B) if cotangents else ()),
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
