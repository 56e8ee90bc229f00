"""Are the kernels right on this machine's GPU? About a minute:

    python -m ttcd_kernels.check [--json FILE] [--timeout 120] [--op OP ...]
                                 [--implementation NAME ...]

Each implementation runs in each dtype in a process of its own, which may crash or hang: forward and
gradients of small odd shapes and of one of 4,096 tokens, with and without documents, twice. Results
must be within bounds of XLA's in float64, and both runs equal bit by bit (`parity`). Exits with 1
if one is not. If all pass, `"auto"` takes the kernels on this machine (`verified`).
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ttcd_kernels import bench, launch, measure, parity, verified
from ttcd_kernels.bench import OPS
from ttcd_kernels.measure import Row
from ttcd_kernels.table import format_table

GPU_KERNELS = ("triton", "mosaic")


class Job(NamedTuple):
    """What one process runs: the cases of an op that are in one dtype."""

    op: str
    implementation: str
    dtype: str


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
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args(arguments)
    if options.job:
        print(json.dumps(checked(Job(*options.job))))
        return
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: no folder {options.json.parent}; create it first")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # many processes, one GPU
    reason = launch.unavailable()
    if reason is not None and {*options.implementation} & {*GPU_KERNELS}:
        raise SystemExit(f"nothing to check: {reason}")
    facts = bench.environment()
    jobs = [
        Job(op, name, dtype)
        for op in options.op
        for dtype in launch.DTYPES
        for name in options.implementation
        if any(name in OPS[op].implementations(case) for case in cases(op, dtype))
    ]
    if not jobs:
        names = ", ".join(options.implementation)
        raise SystemExit(f"nothing to check: no op has an implementation {names} here")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda job: in_process(job, options.timeout), jobs)
        rows = [row for rows in found for row in rows]
    print(format_table(rows), flush=True)
    bench.write({"environment": facts, "rows": rows}, options.json)
    failed = [row for row in rows if row["note"]]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(rows)} failed; the notes above say why")
    gpu = launch.capability()
    if gpu is None or {*options.op} != {*OPS} or {*GPU_KERNELS} - {*options.implementation}:
        print(f"all {len(rows)} passed")
    else:
        file = verified.record(gpu)
        print(f'all {len(rows)} passed: "auto" takes the kernels on this machine ({file})')


def cases(op: str, dtype: str) -> list[Any]:
    return [case for case in OPS[op].SHAPES["check"] if case.dtype == dtype]


def checked(job: Job) -> list[Row]:
    """The rows of `parity.compare` for one implementation in one dtype."""
    op, rows = OPS[job.op], []
    for case in cases(job.op, job.dtype):
        found = parity.compare(op, case, (job.implementation,))
        rows += [{"op": job.op, **row} for row in found]
    return rows


def in_process(
    job: Job, timeout: float, program: Sequence[str] = ("-m", "ttcd_kernels.check")
) -> list[Row]:
    """`checked(job)` in a process of its own; one row with a note if it gives no result."""
    command = [sys.executable, *program, "--job", *job]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return [_lost(job, f"no result after {timeout:g} seconds")]
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [""]
        return [_lost(job, f"exit status {process.returncode}: {lines[-1][:120]}")]
    return json.loads(process.stdout.splitlines()[-1])


def _lost(job: Job, why: str) -> Row:
    return {**job._asdict(), "note": measure.FAILED + why}


if __name__ == "__main__":
    main()
