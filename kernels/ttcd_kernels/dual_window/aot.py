"""The variants of the dual-window kernels that are compiled ahead of time."""

import functools
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ttcd_kernels.aot import Compiled, compile_kernels
from ttcd_kernels.dual_window import mosaic_aot, mosaic_call
from ttcd_kernels.dual_window.api import dual_window_attention_with_lse
from ttcd_kernels.dual_window.tuning import HEAD_DIMS, MOSAIC_TILES

# Longer than any tile, with windows that cut tiles; the machine code does not depend on them.
_LENGTH, _TEACHER_WINDOW, _STUDENT_WINDOW = 65_536, 8192, 4096


def variants(capability: int) -> Iterator[tuple[str, list[Compiled]]]:
    """(name, forward and both backward kernels) of each head dim, plain and with documents; for
    Hopper also the Mosaic forward, where its compiler is installed."""
    for head_dim in HEAD_DIMS:
        for has_segments in (False, True):
            name = f"D{head_dim}" + (" documents" if has_segments else "")
            kernels, _ = compile_gradient(capability, head_dim, has_segments)
            yield name, kernels
    if capability != mosaic_call.CAPABILITY:
        return
    reason = mosaic_aot.unavailable()
    if reason is not None:
        print(f"without the Mosaic kernel: {reason}", file=sys.stderr)
        return
    for head_dim in MOSAIC_TILES:
        yield f"D{head_dim} Mosaic", [mosaic_aot.compile_mosaic(head_dim)]


def compile_gradient(
    capability: int, head_dim: int, has_segments: bool = False
) -> tuple[list[Compiled], list[str]]:
    """The kernels of one forward and backward, and the names in launch order."""
    q = jax.ShapeDtypeStruct((1, _LENGTH, 16, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, _LENGTH, 8, head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, _LENGTH), jnp.int32) if has_segments else None

    def gradient(
        q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        attend = functools.partial(
            dual_window_attention_with_lse,
            teacher_window=_TEACHER_WINDOW,
            student_window=_STUDENT_WINDOW,
            segment_ids=ids,
            implementation="triton",
        )
        results, pull = jax.vjp(attend, q, k, v)
        return pull(results)

    return compile_kernels(gradient, q, k, k, ids, capability=capability)
