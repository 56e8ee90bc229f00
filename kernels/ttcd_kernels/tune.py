"""Times the Triton kernels of an op with candidate tiles, of which the fastest belong in its
`tuning.py`.

    python -m ttcd_kernels.tune [--op dual_window] [--shapes paper] [--case NAME ...] [--json FILE]

One kernel is varied at a time, the others keep the table's tiles; candidates take turns. Tiles that
do not compile (too many registers, too much shared memory) are noted. Needs the GPU it tunes for.
"""

from typing import Any

from ttcd_kernels import bench, launch, measure
from ttcd_kernels.bench import OPS
from ttcd_kernels.measure import MILLISECOND, Row, over
from ttcd_kernels.table import format_table


def main(arguments: list[str] | None = None) -> None:
    about = "Time of the Triton kernels by tile."
    options = bench.parse("tune", about, ["dual_window"], "paper", arguments)
    reason = launch.unavailable()
    if reason is not None:
        raise SystemExit(f"nothing to tune: {reason}")
    report: dict[str, Any] = {"environment": bench.environment(), "rows": []}
    for name, case in bench.cases(options):
        rows = tuned(OPS[name], case)
        print(format_table(rows), flush=True)
        report["rows"] += [{"op": name, **row} for row in rows]
        bench.write(report, options.json)


def tuned(op: Any, case: Any) -> list[Row]:
    """Table rows of every candidate of every kernel, the fastest first, the table's tile included.
    Times are of the whole pass: a backward kernel's include the forward."""
    rows, tuning = [], op.tuning(case)
    for kernel, best in tuning._asdict().items():
        make = measure.gradient if kernel.startswith("backward") else measure.forward
        programs = {
            tile: make(op.with_tuning(case, tuning._replace(**{kernel: tile})), op.NUM_INPUTS)
            for tile in dict.fromkeys((best, *op.CANDIDATES[kernel]))
        }
        timings = measure.timed(programs, op.operand_shapes(case), case.rounds)
        base = timings[best].seconds
        for tile in sorted(timings, key=lambda tile: timings[tile].seconds or float("inf")):
            seconds, _, note = timings[tile]
            row = {"case": case.name, "kernel": kernel, "tile": str(tuple(tile))}
            row |= {"time ms": over(seconds, MILLISECOND), "/ table": over(seconds, base)}
            rows.append(row | {"note": note or "the table's" * (tile == best)})
    return rows


if __name__ == "__main__":
    main()
