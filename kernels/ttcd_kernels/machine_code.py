"""The resources of kernels, compiled ahead of time for a GPU that need not be there."""

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import launch
from ttcd_kernels.launch import Launch

# Bytes of shared memory that a block may take.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
SHARED_LIMIT |= {120: 99 << 10}
REGISTERS = 65_536  # of a multiprocessor, hence of a block
SPILLS = 512  # bytes of a thread that may be outside of its loops
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}


class Compiled(NamedTuple):
    """The resources of one kernel compiled to machine code."""

    name: str
    num_warps: int
    registers: int  # per thread
    spill_bytes: int  # per thread, stores and loads
    shared_bytes: int
    ptx: str
    cubin: bytes


def unfit(kernel: Compiled, capability: int) -> str | None:
    """The reason why a kernel is not worth a run on a GPU of this capability; None if it may be."""
    limit = SHARED_LIMIT[max(known for known in SHARED_LIMIT if known <= capability)]
    if kernel.shared_bytes > limit:
        return f"{kernel.shared_bytes} bytes of shared memory, more than {limit}"
    if kernel.registers * 32 * kernel.num_warps > REGISTERS:
        return f"{kernel.registers} registers of {32 * kernel.num_warps} threads"
    return f"spills {kernel.spill_bytes} bytes" if kernel.spill_bytes > SPILLS else None


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and not isinstance(value, np.generic)


def launches(
    function: Callable[..., Any], operands: Sequence[Any], capability: int
) -> list[Launch]:
    """The launches of `function(*operands)` on a GPU of this capability, in order."""
    with launch.compiling_for(capability), launch.recorded() as found:
        # A function of its own: `jit` of the same would take this trace, without its launches.
        jax.eval_shape(lambda *arrays: function(*arrays), *operands)
    return found


def compile_launch(launched: Launch, capability: int) -> Compiled:
    """Compiled as jax-triton does: arrays are aligned to 16 bytes, numbers that are 1 constants."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants, attributes = launched.kernel, dict(launched.constants), {}
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    arguments = *launched.arguments, *launched.options["out_shape"]
    for index, (name, value) in enumerate(zip(signature, arguments, strict=False)):
        if _is_array(value):
            signature[name] = f"*{_TYPES[jnp.dtype(value.dtype).name]}"
            attributes[index,] = [["tt.divisibility", 16]]
        elif value == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: launched.options[name] for name in ("num_warps", "num_stages")}
    with (
        contextlib.redirect_stdout(io.StringIO()) as report,
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
    ):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = folder, True  # a cached one reports nothing
        compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    registers, *_ = re.findall(r"Used (\d+) registers", report.getvalue())
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report.getvalue())
    return Compiled(
        kernel.__name__,
        options["num_warps"],
        int(registers),
        sum(map(int, spills)),
        compiled.metadata.shared,
        compiled.asm["ptx"],
        compiled.asm["cubin"],
    )
