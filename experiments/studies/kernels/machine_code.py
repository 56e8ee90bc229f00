"""Machine code of the Triton kernels, compiled ahead of time, without a GPU."""

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Sequence
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


def launches(function: Callable[..., Any], operands: Sequence[Any], capability: int) -> Any:
    """The calls of `launch.launch` in `function(*operands)` on a GPU of this capability."""

    def zeros(*_: Any, out_shape: Sequence[Any], **__: Any) -> list[jax.Array]:
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    recorded = mock.Mock(side_effect=zeros)
    with launch.compiling_for(capability), mock.patch.object(launch, "launch", recorded):
        jax.eval_shape(lambda *arrays: function(*arrays), *operands)  # never traced before
    return recorded.call_args_list


def compiled(
    function: Callable[..., Any], operands: Sequence[Any], capability: int
) -> list[Compiled]:
    """The kernels that `function(*operands)` launches, in order. As jax-triton compiles them arrays
    are aligned to 16 bytes and numbers that are 1 constants."""
    calls = launches(function, operands, capability)
    return [_compiled(capability, *call.args, **call.kwargs) for call in calls]


def _compiled(
    capability: int,
    kernel: Any,
    *arguments: Any,
    out_shape: Sequence[Any],
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> Compiled:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = dict.fromkeys(kernel.arg_names, "constexpr"), {}
    for index, (name, value) in enumerate(zip(signature, (*arguments, *out_shape), strict=False)):
        if hasattr(value, "shape") and not isinstance(value, np.generic):
            signature[name] = f"*{_TYPES[jnp.dtype(value.dtype).name]}"
            attributes[index,] = [["tt.divisibility", 16]]
        elif value == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    with (
        contextlib.redirect_stdout(io.StringIO()) as report,
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
    ):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = folder, True  # a cached one reports nothing
        found = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    counts = registers_and_spills(report.getvalue())
    code = found.metadata.shared, found.asm["ptx"], found.asm["cubin"]
    return Compiled(kernel.__name__, num_warps, *counts, *code)


def registers_and_spills(report: str) -> tuple[int, int]:
    """By the assembler's report of a kernel."""
    registers = re.findall(r"Used (\d+) registers", report)[0]
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert len(spills) >= 2, report[-3000:]
    return int(registers), sum(map(int, spills[:2]))
