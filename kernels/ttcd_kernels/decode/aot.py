"""The variants of the decode kernel that are compiled ahead of time."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ttcd_kernels.aot import Compiled, compile_kernels
from ttcd_kernels.decode.api import decode_attention_with_lse
from ttcd_kernels.decode.tuning import HEAD_DIMS


def variants(capability: int) -> Iterator[tuple[str, list[Compiled]]]:
    """(name, the kernel) of each head dim."""
    for head_dim in HEAD_DIMS:
        yield f"D{head_dim}", compile_step(capability, head_dim)[0]


def compile_step(
    capability: int,
    head_dim: int,
    *,
    batch: int = 8,
    num_heads: int = 16,
    num_kv_heads: int = 8,
    teacher_window: int = 8192,
    student_window: int = 4096,
    dtype: str = "bfloat16",
) -> tuple[list[Compiled], list[str]]:
    """The kernels of one call, and the names in launch order."""
    q = jax.ShapeDtypeStruct((batch, num_heads, head_dim), dtype)
    cache = jax.ShapeDtypeStruct((batch, teacher_window, num_kv_heads, head_dim), dtype)
    position = jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = functools.partial(
        decode_attention_with_lse,
        teacher_window=teacher_window,
        student_window=student_window,
        implementation="triton",
    )
    return compile_kernels(step, q, cache, cache, position, capability=capability)
