"""Times the Triton kernels of an op, each alone, with candidate tiles; the fastest belong in its
`tuning.py`.

    python -m ttcd_kernels.tune [--op dual_window] [--shapes paper] [--case NAME ...]
                               [--output FILE]

One kernel is varied at a time. A tile has its own process, which may crash or hang. Processes
compile at the same time and time in turn, while no other compiles (jax-triton keeps nothing that it
compiles on disk). The JSON is written after every tile, and the same command goes on from it. Needs
the GPU it tunes for.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import signal
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from ttcd_kernels import cases, launch, measure
from ttcd_kernels.cases import OPS
from ttcd_kernels.measure import MILLISECOND, Row, over
from ttcd_kernels.table import format_table

TABLE = "the table's"
_GAIN = 0.97  # of the table's time: less is not noise
_COMPILING, _TIMING, _LONGEST = 60, 30, 300  # seconds after which a process hangs
_COUNTS = ("registers", "spill_bytes", "shared_bytes")  # in earlier reports


class Job(NamedTuple):
    """The task of one process: a tile of a kernel."""

    op: str
    shapes: str
    case: str
    kernel: str
    tile: str  # its numbers, with commas


def main(arguments: list[str] | None = None) -> None:
    about = "Time of the Triton kernels by tile."
    parser = cases.parser_of("tune", about, ("dual_window",), "paper")
    parser.add_argument("--job", nargs=len(Job._fields), help=argparse.SUPPRESS)  # in a process
    parser.add_argument("--turn", help=argparse.SUPPRESS)  # of its own
    options = cases.parsed(parser, arguments)
    if options.job:
        print(json.dumps(measured(Job(*options.job), options.turn)))
        return
    reason = launch.unavailable()
    if reason is not None:
        raise SystemExit(f"nothing to tune: {reason}")
    store = cases.Store(parser, options.output, Job)
    left = store.left(jobs(options))
    print(f"{len(left)} tiles to try, {len(store)} tried before", flush=True)
    with tempfile.NamedTemporaryFile() as turn:
        program = ("-m", "ttcd_kernels.tune", "--turn", turn.name)
        for row in store.run(program, left, _LONGEST, _at_once(options)):
            shown = row["note"] if row.get("ms") is None else f"{row['ms']:.4g} ms"
            print(row["case"], row["kernel"], row["tile"], shown, sep="  ", flush=True)
    rows = [*store.values()]
    print(format_table(ranked(rows)), *advice({"rows": rows}), sep="\n", flush=True)


def _at_once(options: argparse.Namespace) -> int:
    """The number of processes whose operands, and as much again, fit in device memory together."""
    sizes = [OPS[name].operand_shapes(case) for name, case in cases.cases(options)]
    largest = max(sum(x.size * x.dtype.itemsize for x in shapes) for shapes in sizes)
    return max(measure.usable_bytes() // (2 * largest), 1)


def jobs(options: argparse.Namespace) -> list[Job]:
    """All tiles: the table's of every kernel, then the candidates of the kernels in turn: if time
    runs out, some of each are measured."""
    found = []
    for op, case in cases.cases(options):
        by_kernel = [
            [
                Job(op, options.shapes, case.name, kernel, ",".join(map(str, tile)))
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


def measured(job: Job, turn: str) -> Row:
    """The row of a tile; `turn` is a file that processes lock."""
    op = OPS[job.op]
    (case,) = (case for case in op.SHAPES[job.shapes] if case.name == job.case)
    best = getattr(table_of(op, case), job.kernel)
    tile = type(best)(*map(int, job.tile.split(",")))
    function, shapes = op.alone(case, job.kernel, tile)
    row: Row = {**job._asdict(), "ms": None, "note": TABLE if tile == best else ""}
    with _turn(turn, fcntl.LOCK_SH, _COMPILING):
        known, calls = measure.ready({job: function}, shapes)
    if not calls:
        return row | {"note": known[job][1]}
    with _turn(turn, fcntl.LOCK_EX, _TIMING):
        seconds = measure.median_seconds(calls, case.rounds)[job]
    return row | {"ms": over(seconds, MILLISECOND)}


@contextlib.contextmanager
def _turn(file: str, kind: int, seconds: int) -> Iterator[None]:
    """Waits for a lock of this `kind` (LOCK_EX: no other process holds one), then ends the process
    unless the block is done in `seconds`."""
    with open(file) as lock:
        fcntl.flock(lock, kind)
        signal.alarm(seconds)
        yield
        signal.alarm(0)


def _by_kernel(rows: list[Row]) -> Iterator[tuple[float | None, list[Row]]]:
    """Of each kernel and case the milliseconds of the table's tile, if that was timed, and all
    rows, the fastest first."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["case"], row["kernel"]), []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: row.get("ms") or float("inf"))
        yield next((row.get("ms") for row in group if row["note"] == TABLE), None), group


def ranked(rows: list[Row]) -> list[Row]:
    """Table rows, the fastest tile of each kernel first."""
    found = []
    for base, group in _by_kernel(rows):
        for row in group:
            shown = {name: row[name] for name in ("case", "kernel", "tile")}
            shown |= {"time ms": row.get("ms"), "/ table": over(row.get("ms"), base)}
            found.append(shown | {name: row.get(name) for name in (*_COUNTS, "note")})
    return found


def advice(report: Row) -> list[str]:
    """What to change in the tables of tiles, by the `rows` of a report."""
    return [
        f"{best['op']}/tuning.py: {best['kernel']} = Tile({best['tile']}) takes "
        f"{best['ms'] / base:.2f} of the table's time for {best['case']}"
        for base, (best, *_) in _by_kernel(report["rows"])
        if base is not None and best["ms"] < _GAIN * base
    ]


if __name__ == "__main__":
    main()
