"""Time of the Triton kernels by tile, each kernel alone, with its registers and spills: `python -m
ttcd_kernels.tune`, the step `tiles` of experiments/studies/kernels. The fastest belong in the op's
`tuning.py`."""

import contextlib
import itertools
import math
import operator
import runpy
import sys
from argparse import Namespace
from typing import Any

import jax.numpy as jnp
from ttcd_kernels import launch, measure
from ttcd_kernels.measure import Row, over

from experiments.studies.kernels import cases, machine_code, programs
from experiments.studies.kernels.runner import Job

TABLE = "the table's"
COUNTS = ("registers", "spill_bytes")
_KERNEL = operator.itemgetter("op", "case", "implementation")


def jobs(options: Namespace) -> list[Job]:
    """The table's tile of every kernel, then the candidates of the kernels in turn: if time runs
    out, some of each are measured. None of Mosaic's, whose blocks are not varied."""
    found = []
    for op, case in cases.chosen(options) if "triton" in options.implementation else ():
        if tuning := getattr(cases.OPS[op], "tuning", None):
            table = table_of(cases.OPS[op], case)._asdict()
            tried = (dict.fromkeys((best, *tuning.CANDIDATES[x])) for x, best in table.items())
            found += [
                Job("tiles", op, case.name, case.dtype, kernel, ",".join(map(str, tile)))
                for tiles in itertools.zip_longest(*tried)
                for kernel, tile in zip(table, tiles, strict=True)
                if tile
            ]
    return found


def table_of(op: Any, case: Any) -> Any:
    """The table's tiles for a case, by kernel."""
    itemsize = jnp.dtype(case.dtype).itemsize
    return op.tuning.tuning_for(launch.known_capability(), case.head_dim, itemsize)


def measured(job: Job) -> Row:
    """The time of a tile, while no other process of this user times one, and what its machine code
    takes of a thread."""
    op, case = cases.OPS[job.op], cases.case_of(job)
    best = getattr(table_of(op, case), job.implementation)
    tile = type(best)(*map(int, job.tile.split(",")))
    from triton.errors import TritonError

    function, shapes = op.alone(case, job.implementation, tile)
    known, calls = programs.ready({job: function}, shapes)
    found: Row = dict.fromkeys(("ms", *COUNTS)) | {"note": known[job][1] or TABLE * (tile == best)}
    if calls:
        with programs.turn():
            seconds = measure.median_seconds(calls, case.rounds)[job]
        found |= {"ms": seconds / measure.MILLISECOND}
        with contextlib.suppress(TritonError, OSError):  # a time without counts
            (kernel,) = machine_code.compiled(function, shapes, launch.known_capability())
            found |= {name: getattr(kernel, name) for name in COUNTS}
    return found


def ranked(rows: list[Row]) -> list[Row]:
    """Table rows, the fastest tile of each kernel first, beside the time of the table's."""
    base = {_KERNEL(x): x.get("ms") for x in rows if x["note"] == TABLE}
    return [
        dict(zip(("op", "case", "kernel"), _KERNEL(x), strict=True))
        | {"tile": x["tile"], "time ms": x.get("ms")}
        | {"/ table": over(x.get("ms"), base.get(_KERNEL(x)))}
        | {name: x.get(name) for name in (*COUNTS, "note")}
        for x in sorted(rows, key=lambda x: (_KERNEL(x), x.get("ms") or math.inf))
    ]


def advice(report: Row) -> list[str]:
    """What to change in the tables of tiles."""
    rows = [row for row in report["rows"] if row["step"] == "tiles"]
    kernels = itertools.groupby(ranked(rows), operator.itemgetter("op", "case", "kernel"))
    return [
        f"{op}/tuning.py: {kernel} = Tile({best['tile']}) takes {best['/ table']:.2f} of the "
        f"table's time for {case}"
        for (op, case, kernel), (best, *_) in kernels
        if (best["/ table"] or 1) < 0.97  # what is nearer may be noise
    ]


if __name__ == "__main__":
    sys.argv[1:1] = ["--steps", "tiles"]
    runpy.run_module("experiments.studies.kernels", run_name="__main__")
