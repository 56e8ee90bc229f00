"""Compiles the kernels ahead of time, to machine code, without a GPU, and counts what they cost.

    python -m tests.machine_code [--capability 90] [--op dual_window ...] [--dtype bfloat16]

prints for each kernel and variant the registers and spilled bytes that the assembler reports, its
shared memory, and of its innermost loops with matrix products the instructions of a warp and the
multiply-adds of a block (in the order of the machine code).
"""

import argparse
import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ttcd_kernels import launch, machine_code, measure
from ttcd_kernels.cases import OPS
from ttcd_kernels.dual_window import mosaic_call
from ttcd_kernels.machine_code import Compiled
from ttcd_kernels.table import format_table

from tests.machine_code import mosaic

# Each compiles to one machine instruction.
_TENSOR_CORES = re.compile(r"\b(?:(?:wgmma\.mma_async|mma)\.sync|tcgen05\.mma)")
_SIZES = {"num_heads": 16, "num_kv_heads": 8, "teacher_window": 8192, "student_window": 4096}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code",
        description="Resources of the kernels, compiled without a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--capability", type=int, choices=machine_code.SHARED_LIMIT, default=90)
    parser.add_argument("--op", choices=OPS, nargs="+", default=list(OPS))
    parser.add_argument("--dtype", choices=launch.DTYPES, default="bfloat16")
    options = parser.parse_args(arguments)
    found: list[tuple[str, Compiled]] = []
    for op in options.op:
        for case in cases(op):
            case = case._replace(dtype=options.dtype)
            found += [(case.name, x) for x in compile_kernels(op, case, options.capability)]
        if op == "dual_window" and options.capability == mosaic_call.CAPABILITY:
            reason = mosaic.unavailable()
            if reason is None:
                found += [(name, x) for name, of in mosaic.compiled().items() for x in of]
            else:
                print(f"without the Mosaic kernels: {reason}", file=sys.stderr)
    print(format_table([_row(name, kernel) for name, kernel in found]))


def _row(variant: str, kernel: Compiled) -> measure.Row:
    found = loops(kernel)
    row = {"variant": variant, **kernel._asdict()}
    del row["ptx"], row["cubin"]
    row["tensor_core_instructions"] = tensor_core_instructions(kernel)
    row["instructions by loop"] = ", ".join(f"{count}" for count, _ in found)
    row["Ki multiply-adds"] = ", ".join(f"{multiply_adds >> 10}" for _, multiply_adds in found)
    return row


def cases(op: str) -> list[Any]:
    """A case of `op` for each variant of its kernels. Machine code depends neither on the lengths,
    longer than any tile, nor on the windows."""
    module: Any = OPS[op]
    head_dims = module.tuning.HEAD_DIMS
    if op == "decode":
        return [module.Case(f"D{x}", 8, head_dim=x, **_SIZES) for x in head_dims]
    return [
        module.Case(f"D{x}{name}", 65_536, head_dim=x, has_documents=bool(name), **_SIZES)
        for x in head_dims
        for name in ("", " documents")
    ]


@functools.cache
def compile_kernels(op: str, case: Any, capability: int) -> list[Compiled]:
    """The kernels of a case's forward and gradients, in the order of their launches."""
    with launch.compiling_for(capability):
        *_, make = measure.directions(OPS[op], case).values()
        whole = make(OPS[op].implementations(case)["triton"])
    launches = machine_code.launches(whole, OPS[op].operand_shapes(case), capability)
    return [machine_code.compile_launch(x, capability) for x in launches]


def tensor_core_instructions(kernel: Compiled) -> int:
    return len(_TENSOR_CORES.findall(kernel.ptx))


def loops(kernel: Compiled) -> list[tuple[int, int]]:
    """Of an iteration of the innermost loops with matrix products, from a label to the branch back
    to it: instructions of a warp, and multiply-adds of the block on tensor cores. None where there
    is no machine code (Mosaic)."""
    if not kernel.cubin:
        return []
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        assembly = subprocess.check_output([tool, "-c", file.name], text=True)
    lines = re.findall(r"^\s*(?:(\.L_x_\d+):|/\*[0-9a-f]+\*/\s+(.*?);)", assembly, re.MULTILINE)
    labels, latest, found = {}, -1, []
    for index, (label, instruction) in enumerate(lines):
        if label:
            labels[label] = index
        target = re.search(r"\bBRA(?:\.\w+)* .*`\((\.L_x_\d+)\)", instruction)
        start = labels.get(target[1], -1) if target else -1
        if start <= latest:  # none, or one around a loop that ended before
            continue
        latest = index
        body = [instruction for _, instruction in lines[start : index + 1] if instruction]
        found.append((len(body), sum(_multiply_adds(x, kernel.num_warps) for x in body)))
    return [(count, multiply_adds) for count, multiply_adds in found if multiply_adds]


def _multiply_adds(instruction: str, num_warps: int) -> int:
    """Of the block: a warp's HMMA is 16 x 8 x k, a warpgroup's (of four) HGMMA m x n x k."""
    group = re.search(r"\bHGMMA\.(\d+)x(\d+)x(\d+)", instruction)
    if group:
        return num_warps // 4 * int(group[1]) * int(group[2]) * int(group[3])
    warp = re.search(r"\bHMMA\.16(8)(8|16)\b", instruction)
    return num_warps * 16 * int(warp[1]) * int(warp[2]) if warp else 0


if __name__ == "__main__":
    main()
