"""Decode attention by the Triton kernels: launches, vmap, meshes, support."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import launch
from ttcd_kernels.decode.tuning import HEAD_DIMS, Tile, slices_for, tuning_for
from ttcd_kernels.launch import Operand
from ttcd_kernels.partitioning import everywhere
from ttcd_kernels.windows import Cache, Position, Query, Results, Windows

_MERGED_AT_ONCE = 16  # slices
_SMALLEST_GROUP, _LARGEST_GROUP = 16, 64  # rows of a matrix product; accumulators in registers


def unsupported(q: Operand, k_cache: Operand, v_cache: Operand) -> str | None:
    """The reason why the kernel cannot take these arrays on this machine; None if it can."""
    group = q.shape[1] // k_cache.shape[2]
    if group > _LARGEST_GROUP:
        return f"{group} query heads per kv head are more than {_LARGEST_GROUP}"
    return launch.unsupported(launch.DTYPES, HEAD_DIMS, q=q, k_cache=k_cache, v_cache=v_cache)


def decode(
    q: Query, k_cache: Cache, v_cache: Cache, position: Position, windows: Windows
) -> Results:
    """All four results of the call, for operands that are not `unsupported`; deterministic. float32
    operands are multiplied in full float32, not TF32."""
    (tile,) = tuning_for(launch.known_capability(q), q.shape[-1], q.dtype.itemsize)
    run = functools.partial(_launch, windows, tile)
    return everywhere(run, "qKKp -> qqll", q, k_cache, v_cache, position)


def _launch(windows: Windows, tile: Tile, q: jax.Array, *cache: jax.Array) -> Results:
    from ttcd_kernels.decode.triton_kernels import decode_merge

    B, N, H = q.shape
    slices = slices_for(tile, B * cache[0].shape[2], windows.teacher, windows.student)
    out, lse = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, N), jnp.float32)
    shares = launch_shares(windows, tile, q, *cache)
    sizes = B, N, slices.near, slices.near + slices.far
    options: Any = {"grid": (N, B, 1), "num_warps": 4, "num_stages": 2, "H": H}
    options |= {"out_shape": [out, out, lse, lse], "BLOCK_X": _MERGED_AT_ONCE}
    results = launch.launch(decode_merge, *shares, *sizes, **options)
    teacher, student, teacher_lse, student_lse = results
    return teacher, student, teacher_lse, student_lse


def launch_shares(
    windows: Windows, tile: Tile, q: Query, k_cache: Cache, v_cache: Cache, position: Position
) -> list[jax.Array]:
    """Each slice's share of the results [slices, B, N, H], with its log-sum-exp [slices, B, N]."""
    from ttcd_kernels.decode.triton_kernels import decode_attention

    (B, N, H), (num_slots, K) = q.shape, k_cache.shape[1:3]
    slices = slices_for(tile, B * K, windows.teacher, windows.student)
    share = slices.near + slices.far, B, N, H
    return launch.launch(
        decode_attention,
        *(q, k_cache, v_cache, position.astype(jnp.int32)),
        *(B, N, K, num_slots),
        *(windows.teacher, windows.student, slices.keys, slices.near),
        np.float32(windows.scale * launch.LOG2E),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (share, share[:-1])],
        grid=(share[0], K, B),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        H=H,
        BLOCK_G=max(_SMALLEST_GROUP, 1 << (N // K - 1).bit_length()),
        BLOCK_N=tile.block_n,
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
    )
