"""Errors, time and device memory of the kernels and their peers: tables on stdout, a file of JSON.

    python -m ttcd_kernels.bench [--op dual_window ...] [--shapes tiny|cpu|paper] [--case NAME ...]
                                 [--implementation NAME ...] [--times_only] [--output FILE]

All ops by default. First every implementation is compared with the definition (`programs.compare`:
small odd shapes; `--times_only` leaves it out, after `check`), then timed. Times are medians of
rounds in which all implementations take turns; bytes are those that the compiler reports; the floor
is the time of the least arithmetic or the least memory traffic, whichever is longer, at this
device's measured ceilings. `tiny` takes a minute or two, `paper` needs a GPU.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ttcd_kernels import measure
from ttcd_kernels.measure import MIB, MILLISECOND, TERA, Ceilings, Row, over
from ttcd_kernels.table import format_table, write_json

from experiments.studies.kernels import cases, programs
from experiments.studies.kernels.cases import OPS
from experiments.studies.kernels.runner import Job

_BASELINE = "xla"  # whose time others are divided by


def main(arguments: list[str] | None = None) -> None:
    parser = cases.parser_of("Errors, time and memory of the kernels and their peers.", "tiny", ())
    parser.add_argument("--times_only", action="store_true", help="without the comparison")
    options = parser.parse_args(arguments)
    cases.parsed(parser, options)
    names, report = options.implementation, {"environment": measure.environment()}
    print(" ".join(f"{key}={value}" for key, value in report["environment"].items()), flush=True)
    ceilings = measure.ceilings()
    flops, rate = (value / TERA for value in ceilings)
    print(f"ceilings of this device: {flops:.3g} Tflop/s, {rate:.3g} TB/s", flush=True)
    ops: dict[str, dict[str, list[Row]]] = {}
    report |= {"ceilings": ceilings._asdict(), "ops": ops}
    for name in options.op:
        shapes = () if options.times_only else OPS[name].SHAPES["parity"]
        compared = [x for case in shapes for x in programs.compare(OPS[name], case, names)]
        if compared:
            print(f"\n{name}\n{format_table(compared)}", flush=True)
        ops[name] = {"parity": compared, "shapes": [], "rows": []}
    for name, case in cases.chosen(options):
        rows = timed(OPS[name], case, ceilings, names)
        if rows:
            print(f"\n{format_table(rows)}", flush=True)
        ops[name]["shapes"].append(case._asdict())
        ops[name]["rows"] += rows
        write_json(report, options.output)  # after every case: a long run may be cut off
    failed = dict.fromkeys(
        row["implementation"]
        for name, found in ops.items()
        for row in (*found["parity"], *found["rows"])
        if row["note"].startswith(programs.FAILED)
        and not row["implementation"].startswith(OPS[name].PEERS)
    )
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the notes above say why")
    if not any(found["rows"] for found in ops.values()):
        raise SystemExit(f"nothing to time: no implementation {', '.join(names)} here")


def jobs(options: Namespace) -> list[Job]:
    """A process per implementation, whose crash costs nothing but its time."""
    return [
        Job("times", op, case.name, case.dtype, name)
        for op, case in cases.chosen(options)
        for name in OPS[op].implementations(case)
        if name in options.implementation or name.startswith(OPS[op].PEERS)
    ]


def measured(job: Job) -> Row:
    """The columns of `timed`, by direction."""
    case, names = cases.case_of(job), (job.implementation,)
    with programs.turn():
        ceilings = measure.ceilings()
    rows = timed(OPS[job.op], case, ceilings, names)
    found = {f"{row['pass']} {x}": row[x] for row in rows for x in ("time ms", "% of floor")}
    return found | {"note": " ".join({row["note"]: 0 for row in rows}).strip()}


def timed(op: Any, case: Any, ceilings: Ceilings, names: Sequence[str] = ()) -> list[Row]:
    """Table rows of all implementations of an op (of those in `names`) in both directions:
    compiled, and timed if they fit. Rates count the work that any implementation has to do; the
    floor is its least time."""
    functions = {
        (direction, name): make(function)
        for direction, make in programs.directions(op, case).items()
        for name, function in op.implementations(case).items()
        if not names or name in names
    }
    known, calls = programs.ready(functions, op.operand_shapes(case))
    with programs.turn():
        timings = measure.median_seconds(calls, case.rounds)
    rows = []
    for (direction, name), (temp_bytes, note) in known.items():
        work, seconds = op.work(case, direction), timings.get((direction, name))
        floor = max(least / rate for least, rate in zip(work, ceilings, strict=True))
        row = {"case": case.name, "pass": direction, "implementation": name}
        more = {
            "time ms": over(seconds, MILLISECOND),
            f"/ {_BASELINE}": over(seconds, timings.get((direction, _BASELINE))),
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
