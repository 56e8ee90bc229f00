"""Time of the Triton kernels by tile, each kernel alone: `python -m ttcd_kernels.tune`, the step
`tiles` of experiments/studies/kernels.

The fastest belong in the op's `tuning.py`. One kernel is varied at a time. Processes compile at the
same time (jax-triton keeps nothing that it compiles on disk), and time in turn.
"""

import itertools
import runpy
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from ttcd_kernels import launch, measure
from ttcd_kernels.measure import MILLISECOND, Row, over

from experiments.studies.kernels import cases, programs
from experiments.studies.kernels.cases import OPS
from experiments.studies.kernels.runner import Job

TABLE = "the table's"
_GAIN = 0.97  # of the table's time: less is not noise
_TIMING = 30  # seconds after which a launch hangs


def jobs(options: Namespace) -> list[Job]:
    """All tiles: the table's of every kernel, then the candidates of the kernels in turn: if time
    runs out, some of each are measured. None of Mosaic's, whose blocks are not varied."""
    found = []
    for op, case in cases.chosen(options) if "triton" in options.implementation else ():
        if not hasattr(OPS[op], "tuning"):
            continue
        by_kernel = [
            [
                Job("tiles", op, case.name, case.dtype, kernel, ",".join(map(str, tile)))
                for tile in dict.fromkeys((best, *OPS[op].tuning.CANDIDATES[kernel]))
            ]
            for kernel, best in table_of(OPS[op], case)._asdict().items()
        ]
        found += filter(None, itertools.chain(*itertools.zip_longest(*by_kernel)))
    return found


def table_of(op: Any, case: Any) -> Any:
    """The table's tiles for a case, by kernel."""
    itemsize = jnp.dtype(case.dtype).itemsize
    return op.tuning.tuning_for(launch.known_capability(), case.head_dim, itemsize)


def measured(job: Job) -> Row:
    """The time of a tile, while no other process of this user times one."""
    op, case = OPS[job.op], cases.case_of(job)
    best = getattr(table_of(op, case), job.implementation)
    tile = type(best)(*map(int, job.tile.split(",")))
    function, shapes = op.alone(case, job.implementation, tile)
    known, calls = programs.ready({job: function}, shapes)
    row: Row = {"ms": None, "note": known[job][1] or TABLE * (tile == best)}
    with programs.turn():
        signal.alarm(_TIMING)
        seconds = measure.median_seconds(calls, case.rounds)
        signal.alarm(0)
    return row | {"ms": over(seconds.get(job), MILLISECOND)}


def _by_kernel(rows: Sequence[Row]) -> Iterator[tuple[float | None, list[Row]]]:
    """Of each kernel and case the milliseconds of the table's tile, if that was timed, and all
    rows, the fastest first."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["case"], row["implementation"]), []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: row.get("ms") or float("inf"))
        yield next((row.get("ms") for row in group if row["note"] == TABLE), None), group


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Table rows, the fastest tile of each kernel first."""
    return [
        {"case": row["case"], "kernel": row["implementation"], "tile": row["tile"]}
        | {"time ms": row.get("ms"), "/ table": over(row.get("ms"), base), "note": row["note"]}
        for base, group in _by_kernel(rows)
        for row in group
    ]


def advice(rows: Sequence[Row]) -> list[str]:
    """What to change in the tables of tiles."""
    return [
        f"{best['op']}/tuning.py: {best['implementation']} = Tile({best['tile']}) takes "
        f"{best['ms'] / base:.2f} of the table's time for {best['case']}"
        for base, (best, *_) in _by_kernel(rows)
        if base is not None and best["ms"] < _GAIN * base
    ]


if __name__ == "__main__":
    sys.argv[1:1] = ["--steps", "tiles"]
    runpy.run_module("experiments.studies.kernels", run_name="__main__")
