"""Measures the kernels and their peers: tables on stdout, JSON with device, versions and clocks.

    python -m ttcd_kernels.bench [--op dual_window ...] [--shapes tiny|cpu|paper] [--case NAME ...]
                                 [--json FILE]

All ops unless told. First every implementation is compared with the definition in float64
(`parity`: small odd shapes), then timed. Times are medians of rounds in which all implementations
take turns; memory is what the compiler reports; the floor is the time that the least arithmetic and
the least traffic would take at this device's own ceilings. `tiny` takes a minute or two, `cpu` some
more on two cores, `paper` wants a GPU.
"""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ttcd_kernels import measure, parity
from ttcd_kernels.decode import bench as decode
from ttcd_kernels.dual_window import bench as dual_window
from ttcd_kernels.short_conv import bench as short_conv

OPS: dict[str, Any] = {"dual_window": dual_window, "decode": decode, "short_conv": short_conv}
SETS = ("tiny", "cpu", "paper")
HEADER = (
    *("case", "pass", "implementation", "time ms", "/ baseline", "Tflop/s", "TB/s", "% of floor"),
    *("temp MiB", "note"),
)


class Row(NamedTuple):
    """One implementation in one direction; None where it was not run. Rates count the work that
    any implementation has to do, `floor_share` is the time of that work over the time taken."""

    case: str
    direction: str
    implementation: str
    seconds: float | None
    ratio: float | None  # to the baseline's time
    flops_per_second: float | None
    bytes_per_second: float | None
    floor_share: float | None
    temp_bytes: int | None
    note: str


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    environment = measure.environment()
    print(" ".join(f"{key}={value}" for key, value in environment.items()), flush=True)
    ceilings = measure.ceilings()
    flops, rate = (measure.tera(value) for value in ceilings)
    print(f"ceilings of this device: {flops} Tflop/s, {rate} TB/s", flush=True)
    report: dict[str, Any] = {"environment": environment, "ceilings": ceilings._asdict()}
    report["ops"], failed = {}, {}
    for name in options.op:
        op = OPS[name]
        cases = [x for x in op.SHAPES[options.shapes] if not options.case or x.name in options.case]
        compared = [row for case in op.SHAPES["parity"] for row in parity.compare(op, case)]
        print(f"\n{name}\n{parity.table(compared)}", flush=True)
        entry = {"shapes": [case._asdict() for case in cases], "rows": []}
        entry["parity"] = [row._asdict() for row in compared]
        report["ops"][name] = entry
        failed |= _failed(op, compared)
        for case in cases:
            rows = measured(op, case, ceilings)
            print(f"\n{table(rows)}", flush=True)
            entry["rows"] += [row._asdict() for row in rows]
            failed |= _failed(op, rows)
            if options.json is not None:  # after every case: a long run may be cut off
                options.json.write_text(json.dumps(report, indent=1) + "\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the notes above say why")


def _failed(op: Any, rows: Sequence[parity.Parity | Row]) -> dict[str, None]:
    """Which of our own implementations refused."""
    return {
        row.implementation: None
        for row in rows
        if row.note.startswith(measure.FAILED) and not row.implementation.startswith(op.PEERS)
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ttcd_kernels.bench",
        description="Parity, time and memory of the kernels and their peers.",
        allow_abbrev=False,
    )
    parser.add_argument("--op", choices=OPS, nargs="+", default=list(OPS), help="what to measure")
    parser.add_argument("--shapes", choices=SETS, default="tiny", help="which set of shapes")
    parser.add_argument("--case", nargs="+", default=[], help="names out of the set; default: all")
    parser.add_argument("--json", type=Path, help="file for the report, written after every case")
    options = parser.parse_args(arguments)
    known = [case.name for op in options.op for case in OPS[op].SHAPES[options.shapes]]
    for name in options.case:
        if name not in known:
            parser.error(f"--case: no {name!r} in {options.shapes}; it has {', '.join(known)}")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: no folder {options.json.parent}; create it first")
    return options


def measured(op: Any, case: Any, ceilings: measure.Ceilings) -> list[Row]:
    """All implementations of an op in both directions: compiled, and timed if they fit."""
    shapes = op.operand_shapes(case)
    compiled, memory, notes = {}, {}, {}
    for key, function in op.programs(case).items():
        memory[key], notes[key] = None, ""
        if key[1] == "reference" and not _may_compile_reference(op, case):
            notes[key] = f"skipped: needs {measure.gibibytes(op.reference_bytes(case))}"
            continue
        try:
            program = jax.jit(function).lower(*shapes).compile()
        except measure.REFUSALS as error:
            notes[key] = measure.refusal(error)
            continue
        memory[key] = measure.temp_bytes(program)
        if measure.needed_bytes(program) < measure.usable_bytes():
            compiled[key] = program
        else:
            limit = measure.gibibytes(measure.usable_bytes())
            notes[key] = f"memory only: does not fit in {limit}"
    seconds = _time(compiled, measure.operands(shapes), case.rounds)
    rows = []
    for direction, name in sorted(memory, key=lambda key: key[0] != "forward"):
        key = direction, name
        time, base = seconds.get(key), seconds.get((direction, op.BASELINE))
        work = op.work(case, direction)
        row = Row(
            case.name,
            direction,
            name,
            time,
            time / base if time and base else None,
            work.flops / time if time else None,
            work.bytes / time if time else None,
            ceilings.floor_seconds(work) / time if time else None,
            memory[key],
            notes[key],
        )
        rows.append(row)
    return rows


def _time(programs: dict, arrays: list[jax.Array], rounds: int) -> dict:
    """Median seconds per program, all in the same rounds."""
    calls: dict[Any, Callable[[], Any]] = {
        key: functools.partial(program, *arrays) for key, program in programs.items()
    }
    return measure.median_seconds(calls, rounds)


def _may_compile_reference(op: Any, case: Any) -> bool:
    """Compiling allocates nothing on the CPU; a GPU's compiler tries products out in memory."""
    return jax.default_backend() == "cpu" or op.reference_bytes(case) < measure.usable_bytes() // 4


def table(rows: list[Row]) -> str:
    cells = [
        (
            *row[:3],
            measure.milliseconds(row.seconds),
            measure.ratio(row.ratio),
            measure.tera(row.flops_per_second),
            measure.tera(row.bytes_per_second),
            measure.percent(row.floor_share),
            measure.mebibytes(row.temp_bytes),
            row.note,
        )
        for row in rows
    ]
    return measure.table(HEADER, cells)


if __name__ == "__main__":
    main()
