"""Time and device memory of the kernels and their peers: `python -m ttcd_kernels.bench`, the step
`times` of experiments/studies/kernels.

Times are medians of rounds; bytes are those that the compiler reports; the floor is the time of the
least arithmetic or the least memory traffic, whichever is longer, at this device's measured
ceilings.
"""

import math
import runpy
import sys
from argparse import Namespace
from collections.abc import Sequence

from ttcd_kernels import measure
from ttcd_kernels.measure import MIB, MILLISECOND, TERA, Row, over

from experiments.studies.kernels import cases, programs
from experiments.studies.kernels.cases import OPS
from experiments.studies.kernels.runner import Job

UNIT = " time ms"  # of a time in a row, after the direction
_BASELINE = "xla"  # whose time others are divided by


def jobs(options: Namespace) -> list[Job]:
    """A process per implementation, whose crash costs nothing but its time."""
    return [
        Job("times", op, case.name, case.dtype, name)
        for op, case in cases.chosen(options)
        for name in OPS[op].implementations(case)
        if name in options.implementation or name.startswith(cases.PEERS)
    ]


def measured(job: Job) -> Row:
    """The columns of both directions, each compiled, and timed if it fits, while no other process
    of this user times one. Rates count the work that any implementation has to do."""
    op, case = OPS[job.op], cases.case_of(job)
    run, found = op.implementations(case)[job.implementation], {}
    functions = {name: make(run) for name, make in programs.directions(op, case).items()}
    known, calls = programs.ready(functions, op.operand_shapes(case))
    with programs.turn():
        ceilings, timings = measure.ceilings(), measure.median_seconds(calls, case.rounds)
    for name, (temp_bytes, _) in known.items():
        work, seconds = op.work(case, name), timings.get(name)
        floor = max(least / rate for least, rate in zip(work, ceilings, strict=True))
        found |= {
            f"{name}{UNIT}": over(seconds, MILLISECOND),
            f"{name} Tflop/s": over(work.flops / TERA, seconds),
            f"{name} TB/s": over(work.bytes / TERA, seconds),
            f"{name} % of floor": over(100 * floor, seconds),
            f"{name} temp MiB": over(temp_bytes, MIB),
        }
    note = " ".join(dict.fromkeys(note for _, note in known.values() if note))
    return found | {"ceilings": ceilings._asdict(), "note": note}


def shown(rows: Sequence[Row]) -> list[Row]:
    """Table rows, one per direction, with the time over XLA's."""
    table, base = [], {row["case"]: row for row in rows if row["implementation"] == _BASELINE}
    for row in rows:
        names = [x.removesuffix(UNIT) for x in row if x.endswith(UNIT)]
        for name in names or [""]:  # none of what was lost
            line = {"case": row["case"], "pass": name, "implementation": row["implementation"]}
            own = [x for x in row if x.startswith(f"{name} ")]
            line |= {"time ms": None} | {x.removeprefix(f"{name} "): row[x] for x in own}
            both = (x.get(f"{name}{UNIT}") for x in (row, base.get(row["case"], {})))
            table.append(line | {f"/ {_BASELINE}": over(*both), "note": row["note"]})
    return table


def tables(rows: Sequence[Row]) -> Row:
    """What a report shows of its rows of this step: the ceilings, and the table of each op."""
    timed = [row for row in rows if row["step"] == "times"]
    of_ops = {x: {"rows": shown([row for row in timed if row["op"] == x])} for x in OPS}
    known = [row["ceilings"] for row in timed if "ceilings" in row]
    unknown = measure.Ceilings(math.nan, math.nan)._asdict()
    return {"ceilings": known[-1] if known else unknown, "ops": of_ops} if timed else {}


if __name__ == "__main__":
    # --times_only: errors are always those of the step `check`, as scripts could choose before.
    sys.argv[1:] = ["--steps", "times", *(x for x in sys.argv[1:] if x != "--times_only")]
    runpy.run_module("experiments.studies.kernels", run_name="__main__")
