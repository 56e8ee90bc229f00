"""The variants of the convolved residual's kernels that are compiled ahead of time."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ttcd_kernels.aot import Compiled, compile_kernels
from ttcd_kernels.short_conv.api import short_conv_residual

_CHUNKS, _LENGTH, _NUM_TAPS = 32, 1024, 5


def variants(capability: int) -> Iterator[tuple[str, list[Compiled]]]:
    """(name, forward and backward kernel): with and without documents and normalised keys."""
    for num_features in (4096, 2816):
        for normalizes_keys in (False, True):
            for has_segments in (False, True):
                facts = (" unit keys" if normalizes_keys else "") + (
                    " documents" if has_segments else ""
                )
                kernels, _ = compile_gradient(
                    capability,
                    num_features,
                    normalizes_keys=normalizes_keys,
                    has_segments=has_segments,
                )
                yield f"F{num_features}{facts}", kernels


def compile_gradient(
    capability: int,
    num_features: int,
    *,
    normalizes_keys: bool,
    has_segments: bool = False,
    dtype: str = "bfloat16",
) -> tuple[list[Compiled], list[str]]:
    """The kernels of one forward and backward, and the names in launch order."""
    z = jax.ShapeDtypeStruct((1, _CHUNKS, _LENGTH, num_features), dtype)
    taps = jax.ShapeDtypeStruct((_NUM_TAPS, num_features), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, _CHUNKS, _LENGTH), jnp.int32) if has_segments else None

    def gradient(z_teacher, z_student, teacher_taps, student_taps, ids):
        def convolve(*operands):
            return short_conv_residual(
                *operands,
                is_causal=True,
                normalizes_keys=normalizes_keys,
                segment_ids=ids,
                implementation="triton",
            )

        results, pull = jax.vjp(convolve, z_teacher, z_student, teacher_taps, student_taps)
        return results, pull(results)

    return compile_kernels(gradient, z, z, taps, taps, ids, capability=capability)
