"""Compiles the kernels ahead of time, from the JAX call to machine code, without a GPU.

    python -m ttcd_kernels.aot [--capability 90] [--op dual_window ...]

prints for each kernel and variant the registers and spilled bytes that the assembler reports, its
shared memory, and its tensor-core instructions.
"""

import argparse
import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ttcd_kernels import bench, launch, measure
from ttcd_kernels.dual_window import mosaic_call
from ttcd_kernels.dual_window.tuning import MOSAIC_TILES
from ttcd_kernels.launch import Compiled
from ttcd_kernels.table import format_table

# Each compiles to one machine instruction.
_TENSOR_CORES = re.compile(r"\b(?:wgmma\.mma_async|mma)\.sync")


def compile_kernels(op: Any, case: Any, capability: int) -> tuple[list[Compiled], list[str]]:
    """(the kernels of a case's forward and gradients compiled for a GPU of this capability, the
    names of the kernels that the program launches, in order)."""
    with launch.compiling_for(capability):
        programs = measure.programs(op, case)
    *_, whole = (program for (_, name), program in programs.items() if name == "triton")
    sources, launched = lower(whole, op.operand_shapes(case), capability)
    return [_assemble(source, capability) for source in sources], launched


def lower(
    function: Callable[..., Any], operands: Any, capability: int
) -> tuple[list["_Source"], list[str]]:
    """(the kernels that jax-triton compiles, as PTX, the names of the kernels launched)."""
    with launch.compiling_for(capability), _without_gpu() as sources:
        traced = jax.jit(function).trace(*operands)
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    assert module is not None
    return sources, _launched(module.operation)


class _Source(NamedTuple):
    """A kernel as jax-triton passes it to JAX's CUDA plugin."""

    name: str
    num_warps: int
    num_ctas: int
    shared_bytes: int
    ptx: str
    ttir: str
    capability: int


def jax_triton_library() -> Any:
    """jax-triton's compiler, importable without JAX's CUDA plugin."""
    plugin: Any = importlib.import_module("jaxlib.gpu_triton")
    for name in ("get_compute_capability", "get_serialized_metadata"):
        if not hasattr(plugin, name):  # jax-triton looks for them when it is imported
            setattr(plugin, name, None)
    from jax_triton import triton_lib

    return triton_lib


@contextlib.contextmanager
def _without_gpu() -> Iterator[list[_Source]]:
    """The kernels that jax-triton compiles in the context, down to PTX, without the CUDA plugin."""
    sources: list[_Source] = []

    def kernel(*facts: Any) -> _Source:
        sources.append(_Source(*facts))
        return sources[-1]

    library = jax_triton_library()
    stand_in = types.SimpleNamespace(
        TritonKernel=kernel,
        # A launch is serialized as the kernel's name, which `_launched` reads.
        TritonKernelCall=lambda kernel, *_: types.SimpleNamespace(
            to_proto=lambda *_: kernel.name.encode()
        ),
        create_array_parameter=lambda *_: None,
        create_scalar_parameter=lambda *_: None,
    )

    original, library.triton_kernel_call_lib = library.triton_kernel_call_lib, stand_in
    library._COMPILED_KERNEL_CACHE.clear()
    try:
        yield sources
    finally:
        library.triton_kernel_call_lib = original
        library._COMPILED_KERNEL_CACHE.clear()


def _launched(operation: Any) -> list[str]:
    """The names of the kernels that a lowered module calls, in order."""
    names = []
    for block in (block for region in operation.regions for block in region):
        for inner in (inner.operation for inner in block):
            attributes = inner.attributes
            if "call_target_name" in attributes and "triton" in str(attributes["call_target_name"]):
                names.append(zlib.decompress(attributes["backend_config"].value_bytes).decode())
            names += _launched(inner)
    return names


def _assemble(kernel: _Source, capability: int) -> Compiled:
    suffix = "a" if capability >= 90 else ""
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(kernel.ptx)
        command = [assembler, "-v", f"-arch=sm_{capability}{suffix}", source, "-o", cubin]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"ptxas failed: {process.stderr.strip()}")
    report = process.stdout + process.stderr
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert registers is not None, report
    instructions = len(_TENSOR_CORES.findall(kernel.ptx))
    spilled = sum(map(int, spills))
    return Compiled(kernel.name, int(registers[1]), spilled, kernel.shared_bytes, instructions)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ttcd_kernels.aot",
        description="Resources of the kernels, compiled without a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--capability", type=int, choices=(80, 90), default=90)
    parser.add_argument("--op", choices=bench.OPS, nargs="+", default=list(bench.OPS))
    options = parser.parse_args(arguments)
    rows = []
    for op in options.op:
        for case in bench.OPS[op].SHAPES["aot"]:
            kernels, _ = compile_kernels(bench.OPS[op], case, options.capability)
            rows += [{"variant": case.name, **kernel._asdict()} for kernel in kernels]
        if op == "dual_window" and options.capability == mosaic_call.CAPABILITY:
            rows += _mosaic_rows()
    print(format_table(rows))


def _mosaic_rows() -> list[measure.Row]:
    """Table rows of the Mosaic forward for Hopper; none where its compiler is not installed."""
    from ttcd_kernels.dual_window import mosaic_aot

    reason = mosaic_aot.unavailable()
    if reason is not None:
        print(f"without the Mosaic kernel: {reason}", file=sys.stderr)
        return []
    return [
        {"variant": f"D{head_dim} Mosaic", **mosaic_aot.compile_mosaic(head_dim)._asdict()}
        for head_dim in MOSAIC_TILES
    ]


if __name__ == "__main__":
    main()
