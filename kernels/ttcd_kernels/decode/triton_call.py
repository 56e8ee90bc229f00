"""Decode attention by the Triton kernel: launch, merge of its slices, vmap, meshes, what it
supports."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import launch
from ttcd_kernels.batching import folds_batch
from ttcd_kernels.decode.tuning import HEAD_DIMS, Tuning, slices_for, tuning_for
from ttcd_kernels.dual_window.lse import merge
from ttcd_kernels.partitioning import partitioned

_LOG2E = 1.4426950408889634
_DTYPES = ("bfloat16", "float16", "float32")
_SMALLEST_GROUP, _LARGEST_GROUP = 16, 64  # rows of a matrix product; accumulators in registers


class _Shape(NamedTuple):
    """Static facts of a call."""

    teacher_window: int
    student_window: int
    scale: float
    tuning: Tuning


def unsupported(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> str | None:
    """Why the kernel cannot take these arrays on this machine; None if it can."""
    if q.shape[-1] not in HEAD_DIMS:
        return f"head dim {q.shape[-1]} is not one of {', '.join(map(str, HEAD_DIMS))}"
    group = q.shape[1] // k_cache.shape[2]
    if group > _LARGEST_GROUP:
        return f"{group} query heads per kv head are more than {_LARGEST_GROUP}"
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    return launch.unfit_dtypes(_DTYPES, **arrays) or launch.unavailable()


def decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    position: jax.Array,
    page_table: jax.Array | None,
    teacher_window: int,
    student_window: int,
    scale: float,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Same contract as `reference.decode`, for operands that are not `unsupported`; deterministic.
    float32 operands are multiplied in full float32, not TF32."""
    if tuning is None:
        capability = launch.capability()
        assert capability is not None
        tuning = tuning_for(capability, q.shape[-1], q.dtype.itemsize)
    shape = _Shape(teacher_window, student_window, scale, tuning)
    group = q.shape[1] // k_cache.shape[2]
    run = functools.partial(_launch, shape)
    results = "b (k g) h, b (k g) h, b (k g), b (k g)"
    if page_table is None:
        rule = f"b (k g) h, b s k h, b s k h, b -> {results}"
        split = partitioned(run, rule, whole=("h", "s"), g=group)
        return folds_batch(split)(q, k_cache, v_cache, position)
    rule = f"b (k g) h, p s k h, p s k h, b, b t -> {results}"
    split = partitioned(run, rule, whole=("h", "p", "s", "t"), g=group)
    return _folds_pages(split)(q, k_cache, v_cache, position, page_table)


def _folds_pages(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(q, k_pool, v_pool, position, page_table)` under `vmap`: one call with a larger B.
    Mapped pools become one, the pages of each numbered behind those of the one before."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(axis_size: int, in_batched: Any, *arrays: Any) -> Any:
        def whole(x: jax.Array, is_batched: bool) -> jax.Array:
            return x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        def fold(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *x.shape[2:])

        pools = list(arrays[1:3])
        q, position, table = (whole(arrays[i], in_batched[i]) for i in (0, 3, 4))
        if any(in_batched[1:3]):
            pools = [whole(*pair) for pair in zip(pools, in_batched[1:3], strict=True)]
            table = table + jnp.arange(axis_size)[:, None, None] * pools[0].shape[1]
            pools = [fold(pool) for pool in pools]
        results = mapped(fold(q), *pools, fold(position), fold(table))
        results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _launch(shape: _Shape, q, k_cache, v_cache, position, page_table=None):
    from ttcd_kernels.decode.triton_kernels import decode_attention

    B, N, H = q.shape
    K = k_cache.shape[2]
    num_slots = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    position = position.astype(jnp.int32)
    tuning, windows = shape.tuning, (shape.teacher_window, shape.student_window)
    slices = slices_for(tuning, B * K, *windows)
    # A page's number is loaded before its keys: with two loads one behind the other the compiler's
    # pipeline has to be twice as deep for the same tiles under way.
    num_stages = tuning.num_stages if page_table is None else 2 * tuning.num_stages - 1
    num_slices = slices.near + slices.far
    outs, lses = launch.launch(
        decode_attention,
        q,
        k_cache,
        v_cache,
        position,
        # Without pages a pointer that is never read stands for the table.
        position if page_table is None else page_table.astype(jnp.int32),
        *(B, N, K, num_slots),
        *windows,
        slices.keys,
        slices.near,
        np.float32(shape.scale * _LOG2E),
        out_shape=[
            jax.ShapeDtypeStruct((num_slices, B, N, H), jnp.float32),
            jax.ShapeDtypeStruct((num_slices, B, N), jnp.float32),
        ],
        grid=(num_slices, K, B),
        num_warps=tuning.num_warps,
        num_stages=num_stages,
        H=H,
        BLOCK_G=max(_SMALLEST_GROUP, 1 << (N // K - 1).bit_length()),
        BLOCK_N=tuning.block_n,
        PAGE_SIZE=0 if page_table is None else k_cache.shape[1],
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
    )
    teacher, teacher_lse = merge(outs, lses)
    student, student_lse = merge(outs[: slices.near], lses[: slices.near])
    return teacher.astype(q.dtype), student.astype(q.dtype), teacher_lse, student_lse
