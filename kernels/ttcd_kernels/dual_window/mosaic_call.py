"""Dual-window attention by the Mosaic kernels for Hopper: launches, gradients, support."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from ttcd_kernels import launch
from ttcd_kernels.dual_window import tiles, triton_call, xla
from ttcd_kernels.dual_window.cotangents import QKV, Residuals, with_gradients
from ttcd_kernels.dual_window.tuning import MOSAIC_TILES, MosaicTile, MosaicTuning
from ttcd_kernels.launch import Operand
from ttcd_kernels.windows import Ids, Keys, Queries, Results, Windows

_DTYPES = ("bfloat16", "float16")
CAPABILITY = 90  # wgmma exists on Hopper only


def unsupported(q: Operand, k: Operand, v: Operand, *_: Any) -> str | None:
    """The reason why the kernel cannot take these arrays on this machine; None if it can."""
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
    """All four results of the call, for operands that are not `unsupported`; differentiable. Raises
    `ValueError` for a `scale` that is not above 0."""
    if windows.scale <= 0:  # the largest score is found before scaling
        raise ValueError(
            f"scale is {windows.scale}, the Mosaic kernel needs one above 0; use 'triton'"
        )
    return with_gradients(_forward, gradients, windows, q, k, v, segment_ids)


def _forward(
    windows: Windows, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
) -> Results:
    """The forward, also under vmap and on a mesh."""

    def run(
        windows: Windows, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None
    ) -> Results:
        # Without the defaults, which JAX's partitioner would take for operands.
        return launch_forward(windows, q, k, v, ids)

    return triton_call.everywhere(run, "QKKI -> QQLL", windows, q, k, v, segment_ids)


def gradients(windows: Windows, saved: Residuals, cotangents: Results) -> QKV:
    """dq, dk, dv from the cotangents of the four results, by the kernels, or in XLA where they
    cannot run."""
    if unsupported(saved.q, saved.k, saved.v) is not None:
        return xla.gradients(windows, saved, cotangents)

    def run(windows: Windows, *arrays: Any) -> QKV:
        return launch_backward(windows, *arrays)

    return triton_call.pulled(run, windows, saved, cotangents)


def launch_forward(
    windows: Windows,
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: Ids | None = None,
    tuning: MosaicTuning | None = None,
    interpret: Any = False,
) -> Results:
    """One launch, without gradients. `interpret`, an instance of `mosaic_gpu.InterpretGPUParams`,
    runs it on a CPU (of at least three threads, or it hangs)."""
    from ttcd_kernels.dual_window.mosaic_kernel import dual_window_forward

    T = q.shape[1]
    tile = (tuning or MOSAIC_TILES[q.shape[-1]]).forward
    static = _static(windows, q, k, segment_ids, tile, interpret)
    operands = _operands(static, tiles.key_tiles, q, k, v, segment_ids)
    results = dual_window_forward(static, operands)
    outs = [out[:, :T] for out in results[::2]]
    lses = [lse[:, :, :T].swapaxes(1, 2) for lse in results[1::2]]
    return outs[-1], outs[0], lses[-1], lses[0]


def launch_backward(windows: Windows, *arrays: Any, **options: Any) -> QKV:
    """dq, dk, dv from the arrays of `triton_call.backward_operands`: two launches. Options as of
    `launch_forward`."""
    dq = launch_backward_q(windows, *arrays, **options)
    return dq, *launch_backward_kv(windows, *arrays, **options)


def launch_backward_q(
    windows: Windows, *arrays: Any, tuning: MosaicTuning | None = None, interpret: Any = False
) -> Queries:
    from ttcd_kernels.dual_window.mosaic_backward import dual_window_backward_q

    q, k, _, ids, *_ = arrays
    tile = (tuning or MOSAIC_TILES[q.shape[-1]]).backward_q
    static = _static(windows, q, k, ids, tile, interpret)
    operands = _backward_operands(static, tiles.key_tiles, *arrays)
    return dual_window_backward_q(static, operands)[:, : q.shape[1]]


def launch_backward_kv(
    windows: Windows, *arrays: Any, tuning: MosaicTuning | None = None, interpret: Any = False
) -> tuple[Keys, Keys]:
    from ttcd_kernels.dual_window.mosaic_backward import dual_window_backward_kv

    q, k, _, ids, *_ = arrays
    tile = (tuning or MOSAIC_TILES[q.shape[-1]]).backward_kv
    static = _static(windows, q, k, ids, tile, interpret)
    operands = _backward_operands(static, tiles.query_tiles, *arrays)
    dk, dv = dual_window_backward_kv(static, operands)
    return dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def _backward_operands(
    static: Any, tiles_of: Callable[..., jax.Array], *arrays: Any
) -> dict[str, jax.Array]:
    *operands, near_out, near_delta, near_lse, far_out, far_delta, far_lse = arrays
    found, block = _operands(static, tiles_of, *operands), static.tile.block_q
    of_bands = (near_out, near_delta, near_lse), (far_out, far_delta, far_lse)
    for band, (d_out, delta, lse) in enumerate(of_bands[: len(static.bands)]):
        found[f"d_out{band}"] = padded(d_out, block)
        for name, x in (("lse", lse * launch.LOG2E), ("delta", delta)):
            found[f"{name}{band}"] = padded(x.swapaxes(1, 2), block, axis=2)
    return found


def _static(
    windows: Windows,
    q: jax.Array,
    k: jax.Array,
    segment_ids: jax.Array | None,
    tile: MosaicTile,
    interpret: Any,
) -> Any:
    from ttcd_kernels.dual_window.mosaic_block import Static

    windows = windows.within(k.shape[1])
    near, far = tiles.bands(windows)
    bands = (near,) if far[0] == far[1] else (near, far)
    halo = k.shape[1] - q.shape[1]
    return Static(bands, halo, windows.scale, tile, segment_ids is not None, interpret)


def _operands(
    static: Any,
    tiles_of: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
) -> dict[str, jax.Array]:
    """By name. Queries and keys are padded to the whole tiles that a kernel copies: no query sees a
    key of the padding."""
    (block_q, block_kv, _), (T, S) = static.tile, (q.shape[1], k.shape[1])
    rows = None if segment_ids is None else tiles.documents(segment_ids)
    operands = {"q": padded(q, block_q), "k": padded(k, block_kv), "v": padded(v, block_kv)}
    operands["tiles"] = tiles_of(static.bands, T, S, block_q, block_kv, rows)
    if rows is not None:
        length = max(operands["q"].shape[1] + static.halo, operands["k"].shape[1])
        operands["ids"] = padded(rows.ids, length)
    return operands


def padded(x: Shaped[Array, "..."], multiple: int, axis: int = 1) -> Shaped[Array, "..."]:
    """With zeros behind the last element of an axis."""
    missing = -x.shape[axis] % multiple
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x
