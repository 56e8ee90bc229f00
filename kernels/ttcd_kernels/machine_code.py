"""What kernels cost in machine code, compiled ahead of time for a GPU that need not be there."""

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import launch, measure
from ttcd_kernels.launch import Launch

CAPABILITIES = (80, 86, 89, 90, 100, 120)
# Bytes of shared memory that a block may take.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
SHARED_LIMIT |= {120: 99 << 10}
REGISTERS = 65_536  # of a multiprocessor, hence of a block
SPILLS = 512  # bytes of a thread that may be outside of its loops
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
# Each compiles to one machine instruction.
_TENSOR_CORES = re.compile(r"\b(?:(?:wgmma\.mma_async|mma)\.sync|tcgen05\.mma)")
_WARPS_PER_GROUP = 4


class Loop(NamedTuple):
    """One iteration of an innermost loop with matrix products."""

    instructions: int  # of a warp
    multiply_adds: int  # of the block, on tensor cores


class Compiled(NamedTuple):
    """The resources of one kernel compiled to machine code."""

    name: str
    num_warps: int
    registers: int  # per thread
    spill_bytes: int  # per thread, stores and loads
    shared_bytes: int
    tensor_core_instructions: int
    loops: tuple[Loop, ...] = ()


def unfit(kernel: Compiled, capability: int) -> str | None:
    """The reason why a kernel is not worth a run on a GPU of this capability; None if it may be."""
    limit = SHARED_LIMIT[max(known for known in SHARED_LIMIT if known <= capability)]
    if kernel.shared_bytes > limit:
        return f"{kernel.shared_bytes} bytes of shared memory, more than {limit}"
    if kernel.registers * 32 * kernel.num_warps > REGISTERS:
        return f"{kernel.registers} registers of {32 * kernel.num_warps} threads"
    return f"spills {kernel.spill_bytes} bytes" if kernel.spill_bytes > SPILLS else None


def alone(
    launched: Launch, integers: Sequence[jax.Array]
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """A recorded launch as a function of its floating arrays, and their shapes; its integer arrays
    are given."""
    results = [x for x in launched.arguments if isinstance(x, jax.ShapeDtypeStruct)]
    given = launched.arguments[: len(launched.arguments) - len(results)]
    is_float = [_is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) for x in given]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        floats, rest = iter(arrays), iter(integers)
        operands = (
            next(floats) if of_float else next(rest) if _is_array(x) else x
            for x, of_float in zip(given, is_float, strict=True)
        )
        return launch.launch(
            launched.kernel,
            *operands,
            out_shape=results,
            grid=launched.grid,
            num_warps=launched.num_warps,
            num_stages=launched.num_stages,
            **launched.constants,
        )

    pairs = zip(given, is_float, strict=True)
    return run, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, of_float in pairs if of_float]


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and not isinstance(value, np.generic)


def launches(
    function: Callable[..., Any], operands: Sequence[Any], capability: int
) -> list[Launch]:
    """The launches of `function(*operands)` on a GPU of this capability, in order."""
    with launch.compiling_for(capability), launch.recorded() as found:
        jax.eval_shape(function, *operands)
    return found


def compile_kernels(op: Any, case: Any, capability: int) -> list[Compiled]:
    """The kernels of a case's forward and gradients, in the order of their launches."""
    with launch.compiling_for(capability):
        programs = measure.programs(op, case)
    *_, whole = (program for (_, name), program in programs.items() if name == "triton")
    return [
        compile_launch(x, capability) for x in launches(whole, op.operand_shapes(case), capability)
    ]


def compile_launch(launched: Launch, capability: int) -> Compiled:
    """Compiled as jax-triton does: arrays are aligned to 16 bytes, numbers that are 1 constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launched.kernel.arg_names
    constants = dict(launched.constants)
    signature, attributes = {}, {}
    for index, (name, value) in enumerate(zip(names, launched.arguments, strict=False)):
        if _is_array(value):
            signature[name] = f"*{_TYPES[jnp.dtype(value.dtype).name]}"
            attributes[index,] = [["tt.divisibility", 16]]
        elif value == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    signature = {name: signature.get(name, "constexpr") for name in names}
    source = ASTSource(launched.kernel, signature, constants, attributes)
    options = {"num_warps": launched.num_warps, "num_stages": launched.num_stages}
    with _reporting() as report:
        kernel = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    registers = re.search(r"Used (\d+) registers", report.getvalue())
    assert registers is not None, report.getvalue()
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report.getvalue())
    return Compiled(
        launched.kernel.__name__,
        launched.num_warps,
        int(registers[1]),
        sum(map(int, spills)),
        kernel.metadata.shared,
        len(_TENSOR_CORES.findall(kernel.asm["ptx"])),
        tuple(_loops(_disassembled(kernel.asm["cubin"]), launched.num_warps)),
    )


@contextlib.contextmanager
def _reporting() -> Iterator[io.StringIO]:
    """Kernels compiled inside come from no cache, and the assembler's reports are collected."""
    report = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(report):
        settings = {"TRITON_CACHE_DIR": folder, "TRITON_DUMP_PTXAS_LOG": "1"}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield report
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _disassembled(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loops(assembly: str, num_warps: int) -> Iterator[Loop]:
    """The innermost loops with matrix products: from a label to the branch back to it."""
    lines = re.findall(r"^\s*(?:(\.L_x_\d+):|/\*[0-9a-f]+\*/\s+(.*?);)", assembly, re.MULTILINE)
    labels, latest = {}, -1
    for index, (label, instruction) in enumerate(lines):
        if label:
            labels[label] = index
        target = re.search(r"\bBRA(?:\.\w+)* .*`\((\.L_x_\d+)\)", instruction)
        start = labels.get(target[1], -1) if target else -1
        if start <= latest:  # none, or one around a loop that ended before
            continue
        latest = index
        body = [instruction for _, instruction in lines[start : index + 1] if instruction]
        multiply_adds = sum(_multiply_adds(instruction, num_warps) for instruction in body)
        if multiply_adds:
            yield Loop(len(body), multiply_adds)


def _multiply_adds(instruction: str, num_warps: int) -> int:
    """Of the block: a warp's HMMA is 16 x 8 x k, a warpgroup's HGMMA m x n x k."""
    group = re.search(r"\bHGMMA\.(\d+)x(\d+)x(\d+)", instruction)
    if group:
        return num_warps // _WARPS_PER_GROUP * int(group[1]) * int(group[2]) * int(group[3])
    warp = re.search(r"\bHMMA\.16(8)(8|16)\b", instruction)
    return num_warps * 16 * int(warp[1]) * int(warp[2]) if warp else 0
