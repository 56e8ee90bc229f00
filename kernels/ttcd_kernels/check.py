"""Are the kernels right on this machine's GPU? A minute or two on 16 cores:

    python -m ttcd_kernels.check [--output FILE] [--timeout 120] [--op OP ...]
                                 [--implementation NAME ...]

Each case of each implementation runs in its own process, which may crash or hang: forward and
gradients, twice, of small odd shapes and of one of 4,096 tokens, in every dtype, with and without
documents. Results must be within bounds of XLA's in float64, and both runs equal bit by bit
(`parity`); exits with 1 if one is not. If all pass, `"auto"` takes the kernels on this machine
(`verified`). The JSON is written after every process, and the same command goes on from it.
"""

import argparse
import json
from collections.abc import Sequence
from typing import NamedTuple

from ttcd_kernels import cases, launch, parity, verified
from ttcd_kernels.cases import OPS
from ttcd_kernels.measure import FAILED, Row
from ttcd_kernels.table import format_table

GPU_KERNELS = ("triton", "mosaic")


class Job(NamedTuple):
    """The task of one process: a case of an op by one implementation."""

    op: str
    implementation: str
    dtype: str
    case: str


def main(arguments: list[str] | None = None) -> None:
    parser = cases.parser_of("check", "Are the kernels right on this machine's GPU?")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one process")
    parser.add_argument("--implementation", nargs="+", default=list(GPU_KERNELS))
    parser.add_argument("--job", nargs=len(Job._fields), help=argparse.SUPPRESS)  # in a process
    options = cases.parsed(parser, arguments)
    if options.job:
        print(json.dumps(checked(Job(*options.job))))
        return
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
    gpu = launch.capability()
    store = cases.Store(parser, options.output, Job, capability=gpu)
    program, left = ("-m", "ttcd_kernels.check"), store.left(jobs, has_lost=True)
    for _ in store.run(program, left, options.timeout):
        pass
    rows = [store[job] for job in jobs]
    print(format_table(rows), *advice(gpu, rows), sep="\n", flush=True)
    failed = [row for row in rows if row["note"]]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(rows)} failed; the notes above say why")
    remembered = ""
    if gpu is not None and {*options.op} == {*OPS} and {*GPU_KERNELS} <= {*options.implementation}:
        file = verified.record(gpu)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        remembered = f': "auto" takes the kernels on this machine ({file})'
    print(f"all {len(rows)} passed{remembered}")


def checked(job: Job) -> Row:
    """The row of `parity.compare`."""
    op = OPS[job.op]
    (case,) = (x for x in op.SHAPES["check"] if (x.dtype, x.name) == (job.dtype, job.case))
    (row,) = parity.compare(op, case, (job.implementation,)) or [{"note": f"{FAILED}no results"}]
    return {**job._asdict(), **row}


def advice(gpu: int | None, rows: Sequence[Row]) -> list[str]:
    """What to change after a check of everything that "auto" may take: `verified.VERIFIED`."""
    passed = {tuple(row[name] for name in Job._fields) for row in rows if not row["note"]}
    of_ops = ((op, case) for op in OPS for case in OPS[op].SHAPES["check"])
    needed = {(op, GPU_KERNELS[0], case.dtype, case.name) for op, case in of_ops}
    if gpu in verified.VERIFIED or not needed <= passed:
        return []
    return [f"verified.py: VERIFIED may have {gpu}, in a commit that brings this report"]


if __name__ == "__main__":
    main()
