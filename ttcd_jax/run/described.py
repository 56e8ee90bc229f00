"""Accelerators that are described, not present: JAX's CUDA compiler makes a step for them.

The compiler is JAX's CUDA plugin, installed with JAX or in `COMPILER`, a folder outside of the
environment's packages (`make .venv/hopper`). It needs neither a GPU nor NVIDIA's libraries.
"""

import functools
import importlib.util
import os
import pkgutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ttcd_jax.train.hardware import DEVICES_PER_NODE, Hardware

COMPILER = Path(sys.prefix) / "hopper"
# By NVIDIA's architecture papers: compute capability, multiprocessors, float32 units in each, GHz,
# bytes of shared memory, of cache, and per second of memory.
_CHIPS = {
    "A100": (8, 108, 64, 1.41, 167_936, 41_943_040, 2_039_000_000_000),
    "H100": (9, 132, 128, 1.98, 233_472, 52_428_800, 3_352_320_000_000),
    "H200": (9, 132, 128, 1.98, 233_472, 62_914_560, 4_800_000_000_000),
    "B200": (10, 148, 128, 1.965, 233_472, 132_644_864, 8_000_000_000_000),
}


def missing_compiler() -> str | None:
    """The reason why there is no compiler for described GPUs; None if there is one."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = [] if plugins is None else list(plugins.submodule_search_locations or [])
    folders.append(str(COMPILER / "jax_plugins"))
    if any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(folders)):
        return None
    return "JAX's CUDA plugin is not installed: make .venv/hopper"


def described_devices(hardware: Hardware, count: int) -> Sequence[Any]:
    """`count` devices, in nodes of `DEVICES_PER_NODE`, that programs can be compiled for. Call it
    before JAX's first array, with a compiler that is not missing."""
    from jax.experimental import topologies

    if str(COMPILER) not in sys.path:
        sys.path.append(str(COMPILER))
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of libraries that only running needs
    per_node = min(count, DEVICES_PER_NODE)
    return topologies.get_topology_desc(
        hardware.name,
        platform="cuda",
        target_config=_target(hardware),
        topology=f"1x{count // per_node}x{per_node}",
    ).devices


def compiled(step: jax.stages.Lowered, mesh: Mesh) -> jax.stages.Compiled:
    """The step, compiled. For described devices its machine code is neither optimised nor
    assembled, which changes neither the arrays that it holds nor what it sends, and takes most of
    the time."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    quick |= {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": _without_assembler().name}
    if mesh.devices.flat[0] in jax.devices():
        return step.compile()
    try:
        return step.compile(quick)
    except jax.errors.JaxRuntimeError as error:
        if "No supported config found" not in str(error):
            raise
        # A product in Triton, whose tiles the compiler chooses on a GPU alone: cuBLAS takes it.
        return step.compile({**quick, "xla_gpu_enable_triton_gemm": False})


@functools.cache
def _without_assembler() -> tempfile.TemporaryDirectory:
    """A folder of CUDA whose assembler writes empty files."""
    folder = tempfile.TemporaryDirectory()
    (assembler := Path(folder.name, "bin/ptxas")).parent.mkdir()
    files = "--version) echo 'release 13.0, V13.0.88' ;; *) : >\"$3\""
    assembler.write_text(f'#!/bin/sh\ncase "$1" in {files} ;; esac\n')
    assembler.chmod(0o755)
    return folder


def _target(hardware: Hardware) -> str:
    capability, cores, units, ghz, shared, cache, rate = _CHIPS[hardware.name]
    feature = " feature_extension: ACCELERATED_FEATURES" if capability >= 9 else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {capability} minor: 0{feature} }}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {ghz}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024}
  shared_memory_per_core: {shared} l2_cache_size: {cache}
  device_memory_size: {int(hardware.memory_bytes)} memory_bandwidth: {rate}
}}
platform_name: "CUDA"
"""
