"""Are the kernels right on this machine's GPU? A minute or two on 16 cores:

    python -m ttcd_kernels.check [--json FILE] [--timeout 120] [--op OP ...]
                                 [--implementation NAME ...]

Each case of each implementation runs in its own process, which may crash or hang: forward and
gradients, twice, of small odd shapes and of one of 4,096 tokens, in every dtype, with and without
documents. Results must be within bounds of XLA's in float64, and both runs equal bit by bit
(`parity`). Exits with 1 if one is not. If all pass, `"auto"` takes the kernels on this machine
(`verified`).
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ttcd_kernels import bench, launch, measure, parity, verified
from ttcd_kernels.bench import OPS
from ttcd_kernels.measure import Row
from ttcd_kernels.table import format_table, write_json

GPU_KERNELS = ("triton", "mosaic")


class Job(NamedTuple):
    """The task of one process: a case of an op by one implementation."""

    op: str
    implementation: str
    dtype: str
    case: str


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ttcd_kernels.check",
        description="Are the kernels right on this machine's GPU?",
        allow_abbrev=False,
    )
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one process")
    parser.add_argument("--op", choices=OPS, nargs="+", default=list(OPS))
    parser.add_argument("--implementation", nargs="+", default=list(GPU_KERNELS))
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)  # in its own process
    options = parser.parse_args(arguments)
    if options.job:
        print(json.dumps(checked(Job(*options.job))))
        return
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: no folder {options.json.parent}; create it first")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # many processes, one GPU
    launch.check_devices()
    reason = launch.unavailable()
    if reason is not None and {*options.implementation} & {*GPU_KERNELS}:
        raise SystemExit(f"nothing to check: {reason}")
    jobs = [
        Job(op, name, case.dtype, case.name)
        for op in options.op
        for case in OPS[op].SHAPES["check"]
        for name in options.implementation
        if name in OPS[op].implementations(case)
    ]
    if not jobs:
        names = ", ".join(options.implementation)
        raise SystemExit(f"nothing to check: no op has an implementation {names} here")
    gpu, rows = launch.capability(), []
    report = {"environment": bench.environment(), "capability": gpu, "rows": rows}
    for found in as_they_end(lambda job: in_process(job, options.timeout), jobs):
        rows += found
        rows.sort(key=lambda row: jobs.index(Job(*(row[name] for name in Job._fields))))
        write_json(report, options.json)  # after every process: a long check may be cut off
    print(format_table(rows), *advice(report), sep="\n", flush=True)
    failed = [row for row in rows if row["note"]]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(rows)} failed; the notes above say why")
    if gpu is None or {*options.op} != {*OPS} or {*GPU_KERNELS} - {*options.implementation}:
        print(f"all {len(rows)} passed")
    else:
        file = verified.record(gpu)
        print(f'all {len(rows)} passed: "auto" takes the kernels on this machine ({file})')


def checked(job: Job) -> list[Row]:
    """The row of `parity.compare`."""
    op = OPS[job.op]
    (case,) = (x for x in op.SHAPES["check"] if (x.dtype, x.name) == (job.dtype, job.case))
    rows = parity.compare(op, case, (job.implementation,))
    return [{"op": job.op, **row} for row in rows] or [_lost(job, "nothing to compare")]


def advice(report: dict[str, Any]) -> list[str]:
    """Advice after a check of all implementations that "auto" may take: `verified.VERIFIED`."""
    notes = {
        (row["op"], row["dtype"], row["case"]): row["note"]
        for row in report["rows"]
        if row["implementation"] == GPU_KERNELS[0]
    }
    everything = {(op, x.dtype, x.name) for op in OPS for x in OPS[op].SHAPES["check"]}
    gpu = report["capability"]
    if gpu in verified.VERIFIED or notes.keys() != everything or any(notes.values()):
        return []
    return [f"verified.py: VERIFIED may have {gpu}, in a commit that brings this report"]


def as_they_end[J](
    run: Callable[[J], list[Row]], jobs: Sequence[J], at_most: int | None = None
) -> Iterator[list[Row]]:
    """`run(job)` of every job, as many at a time as there are cores, or at most so many."""
    cores = os.cpu_count() or 1
    pool = concurrent.futures.ThreadPoolExecutor(min(cores, at_most or cores))
    try:
        for job in concurrent.futures.as_completed([pool.submit(run, job) for job in jobs]):
            yield job.result()
    finally:
        pool.shutdown(cancel_futures=True)


def in_process(
    job: NamedTuple, timeout: float, program: Sequence[str] = ("-m", "ttcd_kernels.check")
) -> list[Row]:
    """The rows that `program` prints of a job, in a separate process; one with a note if it gives
    no result."""
    command = [sys.executable, *program, "--job", *job]
    env = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # the last line is the error's
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return [_lost(job, f"no result after {timeout:g} seconds")]
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [""]
        return [_lost(job, f"exit status {process.returncode}: {lines[-1][:120]}")]
    return json.loads(process.stdout.splitlines()[-1])


def _lost(job: NamedTuple, why: str) -> Row:
    return {**job._asdict(), "note": measure.FAILED + why}


if __name__ == "__main__":
    main()
