"""Compiles the kernels ahead of time, to machine code, without a GPU, and counts what they cost.

    python -m tests.machine_code [--capability 90] [--op dual_window ...] [--dtype bfloat16]

prints for each kernel and variant the registers and spilled bytes that the assembler reports, its
shared memory, and of its innermost loops with matrix products the instructions of a warp, the
multiply-adds of a block and the bytes that it moves in shared memory (in the order of the machine
code). For a Hopper GPU also milliseconds, a forecast (`forecast`): nothing has been timed.

The compiler of Mosaic's kernels is part of JAX's CUDA plugin, which `make .venv/hopper` installs
(without NVIDIA's libraries) outside the environment: inside, it would warn of the missing GPU at
every `import jax`.
"""

import argparse
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ttcd_kernels import launch, measure
from ttcd_kernels.dual_window import mosaic_call, tiles
from ttcd_kernels.dual_window.tuning import COMPUTE_WARPGROUPS, MOSAIC_TILES, tuning_for
from ttcd_kernels.table import format_table

from experiments.studies.kernels import programs
from experiments.studies.kernels.cases import OPS
from experiments.studies.kernels.machine_code import Compiled, compiled, registers_and_spills
from ttcd_jax.run.described import COMPILER, described_devices, missing_compiler
from ttcd_jax.train.hardware import HARDWARE

# Bytes of shared memory that a block may take.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
SHARED_LIMIT |= {120: 99 << 10}
REGISTERS = 65_536  # of a multiprocessor, hence of a block
# Each compiles to one machine instruction.
_TENSOR_CORES = re.compile(r"\b(?:(?:wgmma\.mma_async|mma)\.sync|tcgen05\.mma)")
_SIZES = {"num_heads": 16, "num_kv_heads": 8, "teacher_window": 8192, "student_window": 4096}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code",
        description="Resources of the kernels, compiled without a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--capability", type=int, choices=SHARED_LIMIT, default=90)
    tiled = [name for name, op in OPS.items() if hasattr(op, "tuning")]
    parser.add_argument("--op", choices=tiled, nargs="+", default=tiled)
    parser.add_argument("--dtype", choices=launch.DTYPES, default="bfloat16")
    options = parser.parse_args(arguments)
    found: list[tuple[str, Compiled, str]] = []
    for op in options.op:
        for case in cases(op):
            case = case._replace(dtype=options.dtype)
            is_known = op == "dual_window" and (options.capability, case.dtype) == FORECAST
            for index, kernel in enumerate(compile_kernels(op, case, options.capability)):
                low_high = forecast(case, index, kernel) if is_known else ()
                found.append((case.name, kernel, " to ".join(f"{x:.1f}" for x in low_high)))
        if op == "dual_window" and options.capability == mosaic_call.CAPABILITY:
            reason = missing_compiler()
            if reason is None:
                found += [(name, x, "") for name, of in mosaic_kernels().items() for x in of]
            else:
                print(f"without the Mosaic kernels: {reason}", file=sys.stderr)
    print(format_table([_row(*x) for x in found]))


def _row(variant: str, kernel: Compiled, milliseconds: str) -> measure.Row:
    found = loops(kernel)
    row = {"variant": variant, **kernel._asdict()}
    del row["ptx"], row["cubin"]
    row["tensor_core_instructions"] = tensor_core_instructions(kernel)
    row["instructions by loop"] = ", ".join(f"{x.instructions}" for x in found)
    row["Ki multiply-adds"] = ", ".join(f"{x.multiply_adds >> 10}" for x in found)
    row["KiB moved"] = ", ".join(f"{x.shared_bytes >> 10}" for x in found)
    return row | {"ms": milliseconds}


# Of a multiprocessor, per cycle: multiply-adds of 16-bit numbers, instructions of a warp, bytes of
# shared memory. An H100 has 132 at up to some 1.7 GHz under a load of products.
FORECAST, _RATES, _CYCLES_PER_MS = (90, "bfloat16"), (2048, 4, 128), 132 * 1.7e6


def forecast(case: Any, index: int, kernel: Compiled) -> tuple[float, float]:
    """Milliseconds of the kernel with this index in `Tuning` on an H100: from its tiles without
    masks, if the three pipelines run beside one another, and if instructions wait for the slower
    of the other two. Starts and ends of loops and blocks come on top of both."""
    tile, windows = tuning_for(90, case.head_dim, 2)[index], case.windows
    length, by_key = case.length, index == 2
    sizes = length, length, tile.block_m, tile.block_n
    visited = np.asarray(tiles.visits(tiles.bands(windows), *sizes, by_key=by_key))
    count = int((visited[..., 3] - visited[..., 0]).sum()) * case.batch * case.num_heads
    loop = min(loops(kernel), key=lambda x: x.instructions)
    work = loop.multiply_adds, loop.instructions * kernel.num_warps, loop.shared_bytes
    products, instructions, shared = (x / rate for x, rate in zip(work, _RATES, strict=True))
    slower = max(products, shared)
    least, most = max(slower, instructions), slower + instructions
    return count * least / _CYCLES_PER_MS, count * most / _CYCLES_PER_MS


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
        *_, make = programs.directions(OPS[op], case).values()
        whole = make(OPS[op].implementations(case)["triton"])
    return compiled(whole, OPS[op].operand_shapes(case), capability)


def tensor_core_instructions(kernel: Compiled) -> int:
    return len(_TENSOR_CORES.findall(kernel.ptx))


class Loop(NamedTuple):
    """Of an iteration of an innermost loop with matrix products."""

    instructions: int  # of a warp
    multiply_adds: int  # of the block, on tensor cores
    shared_bytes: int  # that the block reads and writes in shared memory


def loops(kernel: Compiled) -> list[Loop]:
    """Each from a label to the branch back to it. None where there is no machine code (Mosaic)."""
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
        work = (_work(x, kernel.num_warps) for x in body)
        found.append(Loop(len(body), *map(sum, zip(*work, strict=True))))
    return [loop for loop in found if loop.multiply_adds]


def _work(instruction: str, num_warps: int) -> tuple[int, int]:
    """(multiply-adds, bytes in shared memory) of the block: a warp's HMMA is 16 x 8 x k, a
    warpgroup's (of four) HGMMA m x n x k, from whose 16-bit operands the left one may come from
    registers."""
    group = re.search(r"\bHGMMA\.(\d+)x(\d+)x(\d+)\S* R\d+, (R)?", instruction)
    if group:
        m, n, k = map(int, group.groups()[:3])
        read = n * k if group[4] else (m + n) * k
        return num_warps // 4 * m * n * k, num_warps // 4 * 2 * read
    warp = re.search(r"\bHMMA\.16(8)(8|16)\b", instruction)
    if warp:
        return num_warps * 16 * int(warp[1]) * int(warp[2]), 0
    moved = re.search(r"\b(?:LDGSTS|LDS|STS|LDSM|STSM)\b(\S*)", instruction)
    if not moved:
        return 0, 0
    width = 16 if re.search(r"\.(128|4)\b", moved[1]) else 8 if ".64" in moved[1] else 4
    return 0, num_warps * 32 * width


@functools.cache
def mosaic_kernels() -> dict[str, list[Compiled]]:
    """By head dim and documents the kernels at 64K tokens, 16 query heads on 8 kv heads, windows
    8192 and 4096: the forward, dq, dk and dv. Raises `RuntimeError` where they do not compile."""
    dumps = {f"MOSAIC_GPU_DUMP_{name}": "1" for name in ("PTX", "PTXAS", "RESOURCES")}
    machine = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": ""}
    paths = [os.environ.get("PYTHONPATH"), str(COMPILER), str(Path(__file__).parents[2])]
    machine["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    script = "from tests.machine_code.__main__ import compile_mosaic; compile_mosaic()"
    process = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | dumps | machine,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"compiling failed: {process.stderr[-3000:]}")
    if "wgmma.mma_async instructions are serialized" in process.stdout:
        raise RuntimeError("the assembler makes every product wait")
    reports = re.split(r"^Resources\(", process.stdout, flags=re.MULTILINE)[1:]
    kernels = itertools.batched(map(_compiled, reports), 3)
    return {case.name: [*x] for case, x in zip(_mosaic_cases(), kernels, strict=True)}


def _compiled(report: str) -> Compiled:
    (name,) = set(re.findall(r"Compiling entry function '(\w+)' for 'sm_90a'", report))
    shared = re.findall(r"smem_scratch_bytes=(\d+)", report)[0]
    warps = 4 * (COMPUTE_WARPGROUPS + 1)
    return Compiled(name, warps, *registers_and_spills(report), int(shared), report, b"")


def _mosaic_cases() -> list[Any]:
    return [case for case in cases("dual_window") if case.head_dim in MOSAIC_TILES]


def compile_mosaic() -> None:
    """Compiles all variants in this process, which prints the compiler's dumps (MOSAIC_GPU_DUMP_*),
    for a described GPU."""
    (device,) = described_devices(HARDWARE["H100"], 1)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def operand(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 65_536, *shape), dtype, sharding=sharding)

    for case in _mosaic_cases():
        q, k = operand(case.num_heads, case.head_dim), operand(case.num_kv_heads, case.head_dim)
        row = operand(case.num_heads, dtype=jnp.float32)
        ids = operand(dtype=jnp.int32) if case.has_documents else None
        windows, of_bands = case.windows, (q, row, row, q, row, row)
        backward = functools.partial(mosaic_call.launch_backward, windows)
        with launch.compiling_for(90):
            for function, more in (
                (functools.partial(mosaic_call.launch_forward, windows), ()),
                (lambda *arrays, run=backward: run(*arrays)[0], of_bands),  # a kernel per program
                (lambda *arrays, run=backward: run(*arrays)[1:], of_bands),
            ):
                traced = jax.jit(function).trace(q, k, k, ids, *more)
                traced.lower(lowering_platforms=("cuda",)).compile()


if __name__ == "__main__":
    main()
