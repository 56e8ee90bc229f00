"""The variants of the decode kernel that are compiled ahead of time."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ttcd_kernels.aot import Compiled, compile_kernels
from ttcd_kernels.decode.api import decode_attention_with_lse
from ttcd_kernels.decode.tuning import HEAD_DIMS


def variants(capability: int) -> Iterator[tuple[str, list[Compiled]]]:
    """(name, the kernel) of each head dim, with rings and with pages."""
    for head_dim in HEAD_DIMS:
        for page_size in (None, 64):
            name = f"D{head_dim} " + ("ring" if page_size is None else f"pages of {page_size}")
            yield name, compile_step(capability, head_dim, page_size)[0]


def compile_step(
    capability: int,
    head_dim: int,
    page_size: int | None = None,
    *,
    batch: int = 8,
    num_heads: int = 16,
    num_kv_heads: int = 8,
    teacher_window: int = 8192,
    student_window: int = 4096,
    dtype: str = "bfloat16",
) -> tuple[list[Compiled], list[str]]:
    """The kernels of one call, and the names in launch order."""
    slots, rows = (batch, teacher_window), (batch,)
    table = None
    if page_size is not None:
        pages = -(-teacher_window // page_size)
        slots, table = (batch * pages, page_size), jax.ShapeDtypeStruct((batch, pages), jnp.int32)
    q = jax.ShapeDtypeStruct((batch, num_heads, head_dim), dtype)
    cache = jax.ShapeDtypeStruct((*slots, num_kv_heads, head_dim), dtype)

    def step(q, k_cache, v_cache, position, page_table):
        return decode_attention_with_lse(
            q,
            k_cache,
            v_cache,
            position,
            teacher_window=teacher_window,
            student_window=student_window,
            page_table=page_table,
            implementation="triton",
        )

    position = jax.ShapeDtypeStruct(rows, jnp.int32)
    return compile_kernels(step, q, cache, cache, position, table, capability=capability)
