"""What a kernel does in machine code: instructions on tensor cores, and its inner loops."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ttcd_kernels import launch, machine_code, measure
from ttcd_kernels.decode import bench as decode
from ttcd_kernels.dual_window import bench as dual_window

# Each compiles to one machine instruction.
_TENSOR_CORES = re.compile(r"\b(?:(?:wgmma\.mma_async|mma)\.sync|tcgen05\.mma)")
_WARPS_PER_GROUP = 4


class Loop(NamedTuple):
    """One iteration of an innermost loop with matrix products."""

    instructions: int  # of a warp
    multiply_adds: int  # of the block, on tensor cores


class Counts(NamedTuple):
    """The resources of one kernel (`machine_code.Compiled`), and what is counted in its code."""

    name: str
    num_warps: int
    registers: int  # per thread
    spill_bytes: int  # per thread, stores and loads
    shared_bytes: int
    tensor_core_instructions: int
    loops: tuple[Loop, ...] = ()


def cases(op: Any) -> list[Any]:
    """A case of `op` for each variant of its kernels. Machine code depends neither on the lengths,
    longer than any tile, nor on the windows."""
    sizes: Any = {
        "num_heads": 16,
        "num_kv_heads": 8,
        "teacher_window": 8192,
        "student_window": 4096,
    }
    if op is decode:
        return [decode.Case(f"D{x}", 8, head_dim=x, **sizes) for x in decode.tuning.HEAD_DIMS]
    return [
        dual_window.Case(f"D{x}{name}", 65_536, head_dim=x, has_documents=bool(name), **sizes)
        for x in dual_window.tuning.HEAD_DIMS
        for name in ("", " documents")
    ]


def compile_kernels(op: Any, case: Any, capability: int) -> list[Counts]:
    """The kernels of a case's forward and gradients, in the order of their launches."""
    with launch.compiling_for(capability):
        *_, make = measure.directions(op, case).values()
        whole = make(op.implementations(case)["triton"])
    launches = machine_code.launches(whole, op.operand_shapes(case), capability)
    return [_counts(machine_code.compile_launch(x, capability)) for x in launches]


def _counts(kernel: machine_code.Compiled) -> Counts:
    loops = _loops(_disassembled(kernel.cubin), kernel.num_warps)
    return Counts(*kernel[:5], len(_TENSOR_CORES.findall(kernel.ptx)), tuple(loops))


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
