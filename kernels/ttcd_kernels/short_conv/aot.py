"""The variants of the convolved residual's kernels that are compiled ahead of time."""

import functools
from collections.abc import Iterator
from typing import Any

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
                facts = " unit keys" * normalizes_keys + " documents" * has_segments
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

    def gradient(*operands: Any) -> Any:
        convolve = functools.partial(
            short_conv_residual,
            is_causal=True,
            normalizes_keys=normalizes_keys,
            segment_ids=operands[4],
            implementation="triton",
        )
        results, pull = jax.vjp(convolve, *operands[:4])
        return results, pull(results)

    return compile_kernels(gradient, z, z, taps, taps, ids, capability=capability)
