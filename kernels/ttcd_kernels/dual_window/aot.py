"""The variants of the dual-window kernels that are compiled ahead of time."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ttcd_kernels.aot import Compiled, compile_kernels
from ttcd_kernels.dual_window.api import dual_window_attention_with_lse
from ttcd_kernels.dual_window.tuning import HEAD_DIMS

# Longer than any tile, with windows that cut tiles; the machine code does not depend on them.
_LENGTH, _TEACHER_WINDOW, _STUDENT_WINDOW = 65_536, 8192, 4096


def variants(capability: int) -> Iterator[tuple[str, list[Compiled]]]:
    """(name, forward and both backward kernels) of each head dim, plain and with documents."""
    for head_dim in HEAD_DIMS:
        for has_segments in (False, True):
            name = f"D{head_dim}" + (" documents" if has_segments else "")
            kernels, _ = compile_gradient(capability, head_dim, has_segments)
            yield name, kernels


def compile_gradient(
    capability: int, head_dim: int, has_segments: bool = False
) -> tuple[list[Compiled], list[str]]:
    """The kernels of one forward and backward, and the names in launch order."""
    q = jax.ShapeDtypeStruct((1, _LENGTH, 16, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, _LENGTH, 8, head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, _LENGTH), jnp.int32) if has_segments else None

    def gradient(q, k, v, ids):
        def attend(q, k, v):
            return dual_window_attention_with_lse(
                q,
                k,
                v,
                teacher_window=_TEACHER_WINDOW,
                student_window=_STUDENT_WINDOW,
                segment_ids=ids,
                implementation="triton",
            )

        results, pull = jax.vjp(attend, q, k, v)
        return pull(results)

    return compile_kernels(gradient, q, k, k, ids, capability=capability)
