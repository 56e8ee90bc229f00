"""Compiles the Mosaic kernel for Hopper ahead of time, down to machine code, without a GPU.

The compiler is part of JAX's CUDA plugin, which `make .venv/hopper` installs (without NVIDIA's
libraries) outside the environment: inside, it would warn of the missing GPU at every `import jax`.
It compiles for a described GPU in a separate process and reports through the variables
MOSAIC_GPU_DUMP_*.
"""

import functools
import importlib.util
import itertools
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ttcd_kernels import launch
from ttcd_kernels.dual_window import mosaic_call
from ttcd_kernels.dual_window.tuning import COMPUTE_WARPGROUPS, MOSAIC_TILES
from ttcd_kernels.machine_code import Compiled
from ttcd_kernels.windows import Windows

_COMPILER = Path(sys.prefix) / "hopper"
# The facts of a GPU that the compiler needs: an H100's.
_HOPPER = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  device_memory_size: 84929347584 memory_bandwidth: 3352320000000
}
platform_name: "CUDA"
"""


def unavailable() -> str | None:
    """The reason why the kernel cannot be compiled here; None if it can."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = [] if plugins is None else list(plugins.submodule_search_locations or [])
    folders.append(str(_COMPILER / "jax_plugins"))
    if any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(folders)):
        return None
    return "JAX's CUDA plugin is not installed: make .venv/hopper"


@functools.cache
def compiled() -> dict[str, list[Compiled]]:
    """By head dim and documents the kernels at 64K tokens, 16 query heads on 8 kv heads, windows
    8192 and 4096: the forward, dq, dk and dv. Raises `RuntimeError` where they do not compile."""
    dumps = {f"MOSAIC_GPU_DUMP_{name}": "1" for name in ("PTX", "PTXAS", "RESOURCES")}
    machine = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": ""}
    paths = [os.environ.get("PYTHONPATH"), str(_COMPILER), str(Path(__file__).parents[2])]
    machine["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-c", f"from {__name__} import compile_here; compile_here()"]
    env = os.environ | dumps | machine
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"compiling failed: {process.stderr[-3000:]}")
    if "wgmma.mma_async instructions are serialized" in process.stdout:
        raise RuntimeError("the assembler makes every product wait")
    reports = re.split(r"^Resources\(", process.stdout, flags=re.MULTILINE)[1:]
    kernels = itertools.batched(map(_compiled, reports), 3)
    return {name: [*x] for (name, *_), x in zip(_variants(), kernels, strict=True)}


def _compiled(report: str) -> Compiled:
    def numbers(pattern: str) -> Sequence[int]:
        matches = re.findall(pattern, report)
        assert matches, (pattern, report[-3000:])
        return [int(x) for x in matches]

    return Compiled(
        re.findall(r"Compiling entry function '(\w+)' for 'sm_90a'", report)[0],
        4 * (COMPUTE_WARPGROUPS + 1),
        numbers(r"Used (\d+) registers")[0],
        sum(numbers(r"(\d+) bytes spill (?:stores|loads)")[:2]),
        numbers(r"smem_scratch_bytes=(\d+)")[0],
        report,
        b"",
    )


def _variants() -> list[tuple[str, int, bool]]:
    """(name, head dim, whether there are documents)."""
    return [(f"D{x}{' documents' * y}", x, y) for x in MOSAIC_TILES for y in (False, True)]


def compile_here() -> None:
    """Compiles all variants in this process, which prints the compiler's dumps."""
    from jax.experimental import topologies

    described = {"platform": "cuda", "target_config": _HOPPER, "topology": "1x1x1"}
    device = topologies.get_topology_desc("hopper", **described).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)

    def operand(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 65_536, *shape), dtype, sharding=sharding)

    for _, head_dim, has_documents in _variants():
        q, k, row = operand(16, head_dim), operand(8, head_dim), operand(16, dtype=jnp.float32)
        ids = operand(dtype=jnp.int32) if has_documents else None
        windows, of_bands = Windows(8192, 4096, head_dim**-0.5), (q, row, row, q, row, row)
        backward = functools.partial(mosaic_call.launch_backward, windows)
        with launch.compiling_for(90):
            for function, more in (
                (functools.partial(mosaic_call.launch_forward, windows), ()),
                (lambda *arrays, run=backward: run(*arrays)[0], of_bands),  # a kernel per program
                (lambda *arrays, run=backward: run(*arrays)[1:], of_bands),
            ):
                traced = jax.jit(function).trace(q, k, k, ids, *more)
                traced.lower(lowering_platforms=("cuda",)).compile()
