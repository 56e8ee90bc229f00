"""Compiles the kernels ahead of time, to machine code, without a GPU, and counts what they cost.

    python -m tests.machine_code [--capability 90] [--op dual_window ...] [--dtype bfloat16]

prints for each kernel and variant the registers and spilled bytes that the assembler reports, its
shared memory, and of its innermost loops with matrix products the instructions of a warp and the
multiply-adds of a block (in the order of the machine code).
"""

import argparse
import sys

from ttcd_kernels import bench, launch, machine_code, measure
from ttcd_kernels.dual_window import mosaic_call
from ttcd_kernels.dual_window.tuning import MOSAIC_TILES
from ttcd_kernels.table import format_table

from tests.machine_code import counts, mosaic


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code",
        description="Resources of the kernels, compiled without a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--capability", type=int, choices=machine_code.SHARED_LIMIT, default=90)
    parser.add_argument("--op", choices=bench.OPS, nargs="+", default=list(bench.OPS))
    parser.add_argument("--dtype", choices=launch.DTYPES, default="bfloat16")
    options = parser.parse_args(arguments)
    rows = []
    for op in options.op:
        for case in counts.cases(bench.OPS[op]):
            kernels = counts.compile_kernels(
                bench.OPS[op], case._replace(dtype=options.dtype), options.capability
            )
            rows += [_row(case.name, kernel) for kernel in kernels]
        if op == "dual_window" and options.capability == mosaic_call.CAPABILITY:
            rows += _mosaic_rows()
    print(format_table(rows))


def _row(variant: str, kernel: counts.Counts) -> measure.Row:
    loops = ", ".join(f"{loop.instructions}" for loop in kernel.loops)
    products = ", ".join(f"{loop.multiply_adds >> 10}" for loop in kernel.loops)
    row = {"variant": variant, **kernel._asdict()}
    del row["loops"]
    return row | {"instructions by loop": loops, "Ki multiply-adds": products}


def _mosaic_rows() -> list[measure.Row]:
    """Table rows of the Mosaic kernels for Hopper; none where their compiler is not installed."""
    reason = mosaic.unavailable()
    if reason is not None:
        print(f"without the Mosaic kernels: {reason}", file=sys.stderr)
        return []
    return [
        _row(f"D{head_dim}{' documents' * has_documents}", kernel)
        for head_dim in MOSAIC_TILES
        for has_documents in (False, True)
        for kernel in mosaic.compile_mosaic(head_dim, has_documents)
    ]


if __name__ == "__main__":
    main()
