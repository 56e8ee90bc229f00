"""Dual-window attention by the Mosaic kernels for Hopper: launches and support."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from ttcd_kernels import launch
from ttcd_kernels.dual_window import tiles
from ttcd_kernels.dual_window.cotangents import QKV, by_kernels
from ttcd_kernels.dual_window.tuning import MOSAIC_TILES
from ttcd_kernels.launch import Operand
from ttcd_kernels.windows import Ids, Keys, Queries, Results, Windows

_DTYPES = ("bfloat16", "float16")
CAPABILITY = 90  # wgmma exists on Hopper only


def unsupported(
    q: Operand, k: Operand, v: Operand, _: Any = None, windows: Windows | None = None
) -> str | None:
    """The reason why the kernel cannot take these arrays on this machine; None if it can."""
    if windows is not None and windows.scale <= 0:  # the largest score is found before scaling
        return f"scale is {windows.scale}, the kernel needs one above 0"
    reason = launch.unsupported(_DTYPES, MOSAIC_TILES, q=q, k=k, v=v)
    if reason is not None:
        return reason
    gpu = launch.capability(q, k, v)
    if gpu != CAPABILITY:
        return f"the GPU has compute capability {gpu}, not {CAPABILITY} (Hopper)"
    toolkit = _toolkit()
    if toolkit is not None and 12080 <= toolkit < 12091:
        # For this reason JAX's own attention kernel refuses causal masks there.
        return f"the assembler of CUDA {toolkit} is wrong about masked kernels; use CUDA 13"
    return None


def _toolkit() -> int | None:
    """The version of CUDA, e.g. 12090; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    from jax._src.lib import cuda_versions

    assert cuda_versions is not None
    return cuda_versions.cuda_runtime_get_version()


def dual_window(q: Queries, k: Keys, v: Keys, segment_ids: Ids | None, windows: Windows) -> Results:
    """All four results of the call, for operands that are not `unsupported`; differentiable."""
    forward = functools.partial(launch_forward, windows)
    backward = functools.partial(launch_backward, windows)
    return by_kernels(forward, backward, q, k, v, segment_ids)


def launch_forward(windows: Windows, *arrays: Any, interpret: Any = False) -> Results:
    """One launch, without gradients, from q, k, v and ids. `interpret`, an instance of
    `mosaic_gpu.InterpretGPUParams`, runs it on a CPU (of at least three threads, or it hangs)."""
    from ttcd_kernels.dual_window.mosaic_kernel import dual_window_forward

    T = arrays[0].shape[1]
    results = dual_window_forward(*_prepared("forward", windows, arrays, interpret))
    outs = [out[:, :T] for out in results[::2]]
    lses = [lse[:, :, :T].swapaxes(1, 2) for lse in results[1::2]]
    return outs[-1], outs[0], lses[-1], lses[0]


def launch_backward(windows: Windows, *arrays: Any, interpret: Any = False) -> QKV:
    """dq, dk, dv from the arrays of `cotangents.backward_operands`: two launches. `interpret` as of
    `launch_forward`."""
    from ttcd_kernels.dual_window import mosaic_backward as kernels

    more, T, S = (windows, arrays, interpret), arrays[0].shape[1], arrays[1].shape[1]
    dq = kernels.dual_window_backward_q(*_prepared("backward_q", *more))[:, :T]
    dk, dv = kernels.dual_window_backward_kv(*_prepared("backward_kv", *more))
    return dq, dk[:, :S], dv[:, :S]


def _prepared(
    kernel: str, windows: Windows, arrays: Sequence[Any], interpret: Any
) -> tuple[Any, dict[str, jax.Array]]:
    """The static options of a launch of a kernel (a field of `Tuning`), and its operands by name.
    Queries and keys are padded to the whole tiles that it copies: no query sees a key of the
    padding."""
    from ttcd_kernels.dual_window.mosaic_block import Static

    q, k, v, segment_ids, *cotangents = arrays
    T, S = q.shape[1], k.shape[1]
    tile = getattr(MOSAIC_TILES[q.shape[-1]], kernel)
    block_q, block_kv = tile[:2]
    bands = [band for band in tiles.bands(windows.within(S)) if band[0] < band[1]]
    static = Static(tuple(bands), S - T, windows.scale, tile, interpret)
    rows = None if segment_ids is None else tiles.documents(segment_ids)
    operands = {"q": padded(q, block_q), "k": padded(k, block_kv), "v": padded(v, block_kv)}
    by_key = kernel == "backward_kv"
    operands["tiles"] = tiles.visits(bands, T, S, block_q, block_kv, rows, by_key=by_key)
    if rows is not None:
        length = max(operands["q"].shape[1] + static.halo, operands["k"].shape[1])
        operands["ids"] = padded(rows.ids, length)
    for band, (d_out, delta, lse) in enumerate(itertools.batched(cotangents, 3)):
        if band < len(bands):
            operands[f"d_out{band}"] = padded(d_out, block_q)
            for name, x in (("lse", lse * launch.LOG2E), ("delta", delta)):
                operands[f"{name}{band}"] = padded(x.swapaxes(1, 2), block_q, axis=2)
    return static, operands


def padded(x: Shaped[Array, "..."], multiple: int, axis: int = 1) -> Shaped[Array, "..."]:
    """With zeros behind the last element of an axis."""
    missing = -x.shape[axis] % multiple
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x
