"""Dual-window attention by the Mosaic forward for Hopper: launch, gradients, support."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from ttcd_kernels import launch
from ttcd_kernels.dual_window import triton_call
from ttcd_kernels.dual_window.cotangents import with_gradients
from ttcd_kernels.dual_window.tuning import MOSAIC_TILES, MosaicTile
from ttcd_kernels.windows import Results, Windows

_DTYPES = ("bfloat16", "float16")
CAPABILITY = 90  # wgmma exists on Hopper only


def unsupported(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None = None
) -> str | None:
    """The reason why the kernel cannot take these arrays on this machine; None if it can."""
    if segment_ids is not None:
        return "documents (segment_ids) are not supported"
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


def dual_window(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: None, windows: Windows
) -> Results:
    """All four results of the call, for operands that are not `unsupported`; differentiable. Raises
    `ValueError` for a `scale` that is not above 0."""
    if windows.scale <= 0:  # the largest score is found before scaling
        raise ValueError(
            f"scale is {windows.scale}, the Mosaic kernel needs one above 0; use 'triton'"
        )
    return with_gradients(_forward, triton_call.gradients, windows, q, k, v, segment_ids)


def _forward(windows: Windows, q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> Results:
    """The forward, also under vmap and on a mesh."""

    def run(windows: Windows, q: jax.Array, k: jax.Array, v: jax.Array) -> Results:
        # Without the defaults, which JAX's partitioner would take for operands.
        return launch_forward(windows, q, k, v)

    return triton_call.everywhere(run, "QKK -> QQLL", windows, q, k, v)


def launch_forward(
    windows: Windows,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tile: MosaicTile | None = None,
    interpret: Any = False,
) -> Results:
    """One launch, without gradients. Queries and keys are padded to the whole tiles that the kernel
    copies: no query sees a key of the padding. `interpret`, an instance of
    `mosaic_gpu.InterpretGPUParams`, runs it on a CPU (of at least three threads, or it hangs)."""
    from ttcd_kernels.dual_window.mosaic_kernel import Facts, dual_window_forward

    T, S = q.shape[1], k.shape[1]
    teacher_window, student_window, scale = windows.within(S)
    tile = tile or MOSAIC_TILES[q.shape[-1]]
    near, far = (0, student_window), (student_window, teacher_window)
    facts = Facts(
        bands=(near,) if far[0] == far[1] else (near, far),
        num_keys=S,
        first_position=S - T,
        scale_log2=scale * launch.LOG2E,
        tile=tile,
        interpret=interpret,
    )
    q = _padded(q, tile.block_q)
    k, v = _padded(k, tile.block_kv), _padded(v, tile.block_kv)
    results = dual_window_forward(q, k, v, facts)
    results = [(out[:, :T], lse[:, :, :T].swapaxes(1, 2)) for out, lse in results]
    (student, student_lse), (teacher, teacher_lse) = results[0], results[-1]
    return cast(Results, (teacher, student, teacher_lse, student_lse))


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    missing = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x
