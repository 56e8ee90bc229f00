"""The convolved residual of a chunk by the Triton kernels: launches, gradients, support."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ttcd_kernels import launch
from ttcd_kernels.normalize import NORM_EPS
from ttcd_kernels.partitioning import everywhere

# The backward keeps sums of every tap in registers, the forward a row of features.
_MAX_TAPS, _MAX_FEATURES = 8, 16_384
# Chosen by registers and spills (`tests/machine_code`), not by time on a GPU.
_ELEMENTS, _PER_WARP = 16_384, 1024  # of a tile of the forward
_BACKWARD = {"BLOCK_L": 4, "BLOCK_F": 128, "SPAN": 128}

type Results = tuple[jax.Array, jax.Array, jax.Array]


def unsupported(z_teacher: Any, z_student: Any, *taps_and_ids: Any) -> str | None:
    """The reason why the kernels cannot take these arrays on this machine; None if they can."""
    R, F = taps_and_ids[0].shape
    if R > _MAX_TAPS:
        return f"{R} taps are more than {_MAX_TAPS}"
    if F > _MAX_FEATURES:
        return f"{F} features are more than {_MAX_FEATURES}"
    return launch.unsupported(launch.DTYPES, None, z_teacher=z_teacher, z_student=z_student)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def residual(before: int, zero_slope: float | None, *operands: Any) -> Results:
    """(difference, target, key) from both z, both taps and ids; without a `zero_slope` keys are not
    normalised. Deterministic; cotangents are summed in float32, gradients rounded once."""
    return _forward(before, zero_slope, *operands)[0]


def _forward(before: int, zero_slope: float | None, *operands: Any) -> tuple[Results, Any]:
    z_teacher, z_student, *taps, ids = operands
    # vmap may give every row of the batch its own.
    rows = (jnp.broadcast_to(x.astype(jnp.float32), (len(z_student), *x.shape)) for x in taps)
    arrays = z_teacher, z_student, *rows, ids
    run = functools.partial(_launch_forward, before, zero_slope is not None)
    *results, norm = everywhere(run, "ZZPPC -> ZZZC", *arrays)
    difference, target, key = results
    return (difference, target, key), (arrays, taps, key, norm)


def _backward(before: int, zero_slope: float | None, saved: Any, cotangents: Results) -> Any:
    arrays, taps, key, norm = saved
    facts: tuple[Any, ...] = None, None, None
    if zero_slope is not None:
        # Through the norm, slope (d_key - along key). A program of the kernel has a block of
        # features only, so that the sum over all is XLA's.
        along = (key.astype(jnp.float32) * cotangents[2].astype(jnp.float32)).sum(-1)
        is_long = norm > NORM_EPS
        slope = jnp.where(is_long, 1 / jnp.where(is_long, norm, 1), zero_slope)
        facts = key, slope, jnp.where(is_long, along, 0)
    run = functools.partial(_launch_backward, before)
    kinds = "ZZPPCZCCZZZ -> ZZS"
    d_teacher, d_student, sums = everywhere(run, kinds, *arrays, *facts, *cotangents)
    d_taps = (x.astype(like.dtype) for x, like in zip(sums.sum((0, 1)), taps, strict=True))
    return d_teacher, d_student, *d_taps, None


residual.defvjp(_forward, _backward)


def _launch_forward(before: int, normalizes: bool, *arrays: Any) -> list[jax.Array]:
    z, (B, C, L, F) = arrays[0], arrays[0].shape
    width = 1 << (F - 1).bit_length()
    rows = min(max(_ELEMENTS // width, 1), 16)
    result, norm = (jax.ShapeDtypeStruct(*x) for x in ((z.shape, z.dtype), ((B, C, L), "float32")))
    options: dict[str, Any] = {"out_shape": [result] * 3 + [norm], "grid": (-(-L // rows), C, B)}
    options |= {"num_warps": min(max(rows * width // _PER_WARP, 1), 16), "BLOCK_L": rows}
    return _launch("forward", before, arrays, NORMALIZES=normalizes, **options)


def _launch_backward(before: int, *arrays: Any) -> list[jax.Array]:
    """dz of both branches, and sums for both d_taps, of spans of tokens."""
    arrays, facts, cotangents = arrays[:5], arrays[5:8], arrays[8:]
    z, (B, C, L, F), R = arrays[0], arrays[0].shape, arrays[2].shape[1]
    spans, normalizes = -(-L // _BACKWARD["SPAN"]), facts[0] is not None
    dz, sums = (z.shape, z.dtype), ((B, C * spans, 2, R, F), "float32")
    options: dict[str, Any] = {"out_shape": [jax.ShapeDtypeStruct(*x) for x in (dz, dz, sums)]}
    options |= {"grid": (-(-F // _BACKWARD["BLOCK_F"]) * spans, C, B), "num_warps": 4, **_BACKWARD}
    more = *(facts if normalizes else (z,) * 3), *cotangents  # z: never read
    return _launch("backward", before, arrays, *more, NORMALIZES=normalizes, **options)


def _launch(name: str, before: int, arrays: Any, *more: Any, **options: Any) -> list[jax.Array]:
    from ttcd_kernels import short_conv_kernels

    z, _, taps, _, ids = arrays
    (_, C, L, F), R = z.shape, taps.shape[1]
    options |= {"F": F, "R": R, "BEFORE": before, "HAS_SEGMENTS": ids is not None}
    ids = z if ids is None else ids.astype(jnp.int32)  # without segments never read
    kernel = getattr(short_conv_kernels, f"short_conv_residual_{name}")
    return launch.launch(kernel, *arrays[:4], ids, *more, C, L, num_stages=1, **options)
