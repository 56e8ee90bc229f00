"""Times the Triton kernels of an op with other tiles than the table's: what to write into its
`tuning.py`.

    python -m ttcd_kernels.tune [--op dual_window] [--shapes paper] [--case NAME ...] [--json FILE]

Each kernel is varied by itself, the others as the table has them; candidates take turns. What does
not compile (too many registers, too much shared memory) is noted. Needs the GPU it tunes for.
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ttcd_kernels import launch, measure
from ttcd_kernels.bench import OPS, SETS

HEADER = ("case", "kernel", "tile", "time ms", "/ table", "note")


class Row(NamedTuple):
    """One tile of one kernel; `seconds` is of the whole pass, None where it did not compile."""

    case: str
    kernel: str
    tile: str
    seconds: float | None
    ratio: float | None  # to the time with the table's tile
    note: str


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    reason = launch.unavailable()
    if reason is not None:
        raise SystemExit(f"nothing to tune: {reason}")
    op = OPS[options.op]
    environment = measure.environment()
    print(" ".join(f"{key}={value}" for key, value in environment.items()), flush=True)
    known = {case.name: case for case in op.SHAPES[options.shapes]}
    for name in options.case:
        if name not in known:
            raise SystemExit(f"--case: no {name!r} in {options.shapes}; it has {', '.join(known)}")
    rows = []
    for name in options.case or known:
        found = tuned(op, known[name])
        print(table(found), flush=True)
        rows += found
    if options.json is not None:
        report = {"op": options.op, "environment": environment}
        report["rows"] = [row._asdict() for row in rows]
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ttcd_kernels.tune",
        description="Time of the Triton kernels by tile.",
        allow_abbrev=False,
    )
    parser.add_argument("--op", choices=OPS, default="dual_window", help="what to tune")
    parser.add_argument("--shapes", choices=SETS, default="paper", help="which set of shapes")
    parser.add_argument("--case", nargs="+", default=[], help="names out of the set; default: all")
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: no folder {options.json.parent}; create it first")
    return options


def tuned(op: Any, case: Any) -> list[Row]:
    """Every candidate of every kernel, the fastest first; the table's is among them."""
    shapes = op.operand_shapes(case)
    arrays = measure.operands(shapes)
    rows = []
    for kernel, search in op.searches(case).items():
        calls, notes = {}, {}
        for tile, function in search.programs.items():
            notes[tile] = ""
            try:
                program = jax.jit(function).lower(*shapes).compile()
                jax.block_until_ready(program(*arrays))  # a launch may be refused, too
            except measure.REFUSALS as error:
                notes[tile] = measure.refusal(error)
            else:
                calls[tile] = functools.partial(program, *arrays)
        seconds = measure.median_seconds(calls, case.rounds)
        base = seconds.get(search.table)
        for tile in sorted(notes, key=lambda tile: seconds.get(tile, float("inf"))):
            time = seconds.get(tile)
            ratio = time / base if time and base else None
            note = notes[tile] or ("the table's" if tile == search.table else "")
            rows.append(Row(case.name, kernel, str(tuple(tile)), time, ratio, note))
    return rows


def table(rows: list[Row]) -> str:
    cells = [
        (*row[:3], measure.milliseconds(row.seconds), measure.ratio(row.ratio), row.note)
        for row in rows
    ]
    return measure.table(HEADER, cells)


if __name__ == "__main__":
    main()
