"""Are the kernels right on this machine's GPU? `python -m ttcd_kernels.check [--output FILE] ...`:
the step `check` of experiments/studies/kernels.

All results and, with cotangents on all, gradients, in every dtype, with and without documents and
halo, of odd shapes, of 4,096 tokens, and of more than 2^31 elements (the last rows), are within
bounds of the definition in float64 (`programs.compare`), and those of a second run equal.
"""

import runpy
import sys
from argparse import Namespace

from ttcd_kernels import launch, verified
from ttcd_kernels.measure import Row

from experiments.studies.kernels import cases, programs
from experiments.studies.kernels.cases import GPU_KERNELS, OPS
from experiments.studies.kernels.runner import Job, job_of


def jobs(options: Namespace) -> list[Job]:
    """Those of every op and implementation; the case of 2^31 elements on a GPU alone."""
    return [
        Job("check", op, case.name, case.dtype, name)
        for op in options.op
        for case in OPS[op].SHAPES["check"]
        if case.num_compared is None or launch.capability() is not None
        for name in options.implementation
        if name in OPS[op].implementations(case)
    ]


def measured(job: Job) -> Row:
    """The row of `programs.compare`."""
    rows = programs.compare(OPS[job.op], cases.case_of(job), (job.implementation,))
    return rows[0] if rows else {"note": f"{programs.FAILED}no results"}


def advice(report: Row) -> list[str]:
    """What to change after a check of everything that "auto" may take: `verified.VERIFIED`."""
    gpu = launch.capability()
    if gpu is None or gpu in verified.VERIFIED:
        return []
    passed = {job_of(row) for row in report["rows"] if not row["note"]}
    needed = {*jobs(Namespace(op=[*OPS], implementation=GPU_KERNELS))}
    text = f"verified.py: VERIFIED may have {gpu}, in a commit that brings this report"
    return [text] if needed <= passed else []


if __name__ == "__main__":
    sys.argv[1:1] = ["--steps", "check"]
    runpy.run_module("experiments.studies.kernels", run_name="__main__")
