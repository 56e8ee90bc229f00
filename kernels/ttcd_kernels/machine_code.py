"""The resources of kernels, compiled ahead of time for a GPU that need not be there."""

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

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


def alone(
    launched: Launch, integers: Sequence[Int[Array, "..."]]
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
        kernel.asm["ptx"],
        kernel.asm["cubin"],
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
