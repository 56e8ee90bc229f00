"""Machine code of the Triton kernels, compiled ahead of time, without a GPU."""

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from ttcd_kernels import launch

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


class Launch(NamedTuple):
    """A kernel, its arguments (arrays, numbers), the constants of its compiler and the options of
    `launch.launch`."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]


def launches(
    function: Callable[..., Any], operands: Sequence[Any], capability: int
) -> list[Launch]:
    """The launches of `function(*operands)` on a GPU of this capability, in order."""
    found = []

    def record(kernel: Any, *args: Any, **named: Any) -> list[jax.Array]:
        options = {x: named.pop(x) for x in ("out_shape", "grid", "num_warps", "num_stages")}
        found.append(Launch(kernel, args, named, options))
        return [jnp.zeros(x.shape, x.dtype) for x in options["out_shape"]]

    with launch.compiling_for(capability), mock.patch.object(launch, "launch", record):
        jax.eval_shape(lambda *arrays: function(*arrays), *operands)  # never traced before
    return found


def compiled(
    function: Callable[..., Any], operands: Sequence[Any], capability: int
) -> list[Compiled]:
    """The kernels that `function(*operands)` launches, in order."""
    return [compile_launch(x, capability) for x in launches(function, operands, capability)]


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
        if hasattr(value, "shape") and not isinstance(value, np.generic):
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
    counts = registers_and_spills(report.getvalue())
    code = compiled.metadata.shared, compiled.asm["ptx"], compiled.asm["cubin"]
    return Compiled(kernel.__name__, options["num_warps"], *counts, *code)


def registers_and_spills(report: str) -> tuple[int, int]:
    """By the assembler's report of a kernel."""
    registers = re.findall(r"Used (\d+) registers", report)[0]
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert len(spills) >= 2, report[-3000:]
    return int(registers), sum(map(int, spills[:2]))
