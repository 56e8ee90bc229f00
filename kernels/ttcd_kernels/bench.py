"""Measures the kernels and their peers: tables on stdout, JSON with device, versions and clocks.

    python -m ttcd_kernels.bench [--op dual_window ...] [--shapes tiny|cpu|paper] [--case NAME ...]
                                 [--implementation NAME ...] [--times_only] [--output FILE]

All ops by default. First every implementation is compared with XLA's in float64 (`parity`: small
odd shapes; `--times_only` leaves it out, after `check`), then timed. Times are medians of rounds in
which all implementations take turns; bytes are those that the compiler reports; the floor is the
time of the least arithmetic or the least memory traffic, whichever is longer, at this device's
measured ceilings. `tiny` takes a minute or two, `cpu` a few more on two cores, `paper` needs a GPU.
"""

from collections.abc import Sequence
from typing import Any

from ttcd_kernels import cases, measure, parity
from ttcd_kernels.cases import OPS
from ttcd_kernels.measure import MIB, MILLISECOND, TERA, Ceilings, Row, over
from ttcd_kernels.parity import BASELINE
from ttcd_kernels.table import format_table, write_json


def main(arguments: list[str] | None = None) -> None:
    about = "Parity, time and device memory of the kernels and their peers."
    parser = cases.parser_of("bench", about, shapes="tiny")
    parser.add_argument(
        "--implementation", nargs="+", default=[], help="which of them (default: all)"
    )
    parser.add_argument("--times_only", action="store_true", help="without the comparison")
    options = cases.parsed(parser, arguments)
    names, report = options.implementation, {"environment": cases.environment()}
    ceilings = measure.ceilings()
    flops, rate = (value / TERA for value in ceilings)
    print(f"ceilings of this device: {flops:.3g} Tflop/s, {rate:.3g} TB/s", flush=True)
    ops: dict[str, dict[str, list[Row]]] = {}
    report |= {"ceilings": ceilings._asdict(), "ops": ops}
    for name in options.op:
        shapes = () if options.times_only else OPS[name].SHAPES["parity"]
        compared = [x for case in shapes for x in parity.compare(OPS[name], case, names)]
        if compared:
            print(f"\n{name}\n{format_table(compared)}", flush=True)
        ops[name] = {"parity": compared, "shapes": [], "rows": []}
    for name, case in cases.cases(options):
        rows = measured(OPS[name], case, ceilings, names)
        if rows:
            print(f"\n{format_table(rows)}", flush=True)
        ops[name]["shapes"].append(case._asdict())
        ops[name]["rows"] += rows
        write_json(report, options.output)  # after every case: a long run may be cut off
    failed = dict.fromkeys(
        row["implementation"]
        for name, found in ops.items()
        for row in (*found["parity"], *found["rows"])
        if row["note"].startswith(measure.FAILED)
        and not row["implementation"].startswith(OPS[name].PEERS)
    )
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the notes above say why")
    if not any(found["rows"] for found in ops.values()):
        raise SystemExit(f"nothing to time: no implementation {', '.join(names)} here")


def measured(op: Any, case: Any, ceilings: Ceilings, names: Sequence[str] = ()) -> list[Row]:
    """Table rows of all implementations of an op (of those in `names`) in both directions:
    compiled, and timed if they fit. Rates count the work that any implementation has to do; the
    floor is its least time."""
    programs = {
        (direction, name): make(function)
        for direction, make in measure.directions(op, case).items()
        for name, function in op.implementations(case).items()
        if not names or name in names
    }
    known, calls = measure.ready(programs, op.operand_shapes(case))
    timings = measure.median_seconds(calls, case.rounds)
    rows = []
    for (direction, name), (temp_bytes, note) in known.items():
        work, seconds = op.work(case, direction), timings.get((direction, name))
        floor = max(least / rate for least, rate in zip(work, ceilings, strict=True))
        row = {"case": case.name, "pass": direction, "implementation": name}
        more = {
            "time ms": over(seconds, MILLISECOND),
            f"/ {BASELINE}": over(seconds, timings.get((direction, BASELINE))),
            "Tflop/s": over(work.flops / TERA, seconds),
            "TB/s": over(work.bytes / TERA, seconds),
            "% of floor": over(100 * floor, seconds),
            "temp MiB": over(temp_bytes, MIB),
            "note": note,
        }
        rows.append(row | more)
    return rows


if __name__ == "__main__":
    main()
