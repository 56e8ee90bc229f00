"""A GPU's first half hour: are the kernels right, how fast, with which tiles, in a model's step?

    python -m experiments.kernels --output FILE [--minutes 9] [--steps check times ...]

Every job is a process with a limit and a row in FILE (`runner`): each case beside its definition
(check), each kernel and its peers by time (times), the first cases under compute-sanitizer where it
is installed (memcheck), a model's step, the kernels of that step by time (profile), and each tile
of each kernel (tiles). Where the minutes end first the status is 75, and the same command goes on;
2: there is no GPU, 1: a job failed. XLA at tiny sizes, without a GPU: --shapes tiny
--implementation xla
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ttcd_kernels import launch
from ttcd_kernels.measure import Row
from ttcd_kernels.table import format_table

from experiments.studies.kernels import bench, cases, check, profile, programs, tune
from experiments.studies.kernels.cases import FOR_GPU, GPU_KERNELS, OPS, PEERS
from experiments.studies.kernels.runner import PROGRAM, Job, Store

_MODELS = ("ipttcd_760m.gin", "swa_760m.gin")
_LATER = 75  # what is measured is saved: run it again


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(description="A GPU's first half hour.", allow_abbrev=False)
    parser.add_argument("--op", choices=OPS, nargs="+", default=[*OPS], help="kernels of these ops")
    parser.add_argument("--implementation", nargs="+", default=[*GPU_KERNELS], help="which")
    parser.add_argument("--output", "--json", type=Path, help="the report, written as it grows")
    sets = ("tiny", "cpu", *FOR_GPU)
    parser.add_argument("--shapes", choices=sets, default="paper", help="a set of shapes to time")
    parser.add_argument("--case", nargs="+", default=[], help="names in the set")
    parser.add_argument("--minutes", type=float, default=math.inf, help="none is started after")
    parser.add_argument("--timeout", type=float, help="seconds of a process (default: by step)")
    parser.add_argument("--steps", choices=STEPS, nargs="+", default=[*STEPS], help="which")
    parser.add_argument("--job", nargs=len(Job._fields), help=argparse.SUPPRESS)  # in a process
    options = parser.parse_args(arguments)
    if options.job:  # no device is touched but by the job
        print(json.dumps(STEPS[options.job[0]].measured(Job(*options.job))))
        return
    _check(parser, options)
    store, lines = Store(parser, options.output, options.minutes), []
    store.tables = bench.tables
    jobs = {name: STEPS[name].jobs(options) for name in options.steps}
    for name, wanted in jobs.items():
        step = STEPS[name]
        for row in store.run(wanted, options.timeout or step.seconds, step.at_once):
            if row["note"].startswith(programs.FAILED):
                print(*(row[x] for x in Job._fields), row["note"], flush=True)
        rows = [store[job] for job in wanted if job in store]
        print(f"\n{name}: {len(rows)} of {len(wanted)}", flush=True)
        print(format_table(step.shown(rows)) if rows else "", flush=True)
        lines += step.advice({"rows": rows})
    print(*lines, sep="\n")
    wanted = [job for of_step in jobs.values() for job in of_step]
    if not wanted:
        names = ", ".join(options.implementation)
        raise SystemExit(f"nothing to do: no op has an implementation {names} here")
    if left := sum(job not in store for job in wanted):
        print(f"{left} of {len(wanted)} are left: the same command goes on")
        raise SystemExit(_LATER)
    ours = [x for x in wanted if x.step != "tiles" and not x.implementation.startswith(PEERS)]
    if failed := sum(store[job]["note"].startswith(programs.FAILED) for job in ours):
        raise SystemExit(f"{failed} of {len(wanted)} failed; the notes above say why")
    print(f"all {len(wanted)} done")


def _check(parser: ArgumentParser, options: Namespace) -> None:
    """Ends the command with status 2 where JAX finds no device or refuses its variables, and where
    there is no GPU for kernels, or to time shapes, that need one: no time of a CPU gets their
    names. The processes of a command share a GPU."""
    known = [case.name for op in options.op for case in OPS[op].SHAPES[options.shapes]]
    for name in options.case:
        if name not in known:
            parser.error(f"--case: no {name!r} in {options.shapes}; it has {', '.join(known)}")
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"--output: no folder {options.output.parent}; create it first")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        jax.devices()
    except (RuntimeError, AssertionError, ValueError) as error:
        chosen, cause = os.environ.get("JAX_PLATFORMS"), str(error) or "no such device"
        print(f"error: JAX_PLATFORMS={chosen}: {cause.splitlines()[0]}: unset it", file=sys.stderr)
        raise SystemExit(2) from None
    is_timed = options.steps != ["check"] and options.shapes in FOR_GPU
    is_for_gpu = is_timed or {*options.implementation} & {*GPU_KERNELS}
    if is_for_gpu and (reason := launch.unavailable()):
        parser.error(reason)


def _shown(rows: Sequence[Row]) -> list[Row]:
    hidden = ("step", "tile", "surroundings", "note")
    names = [x for x in dict.fromkeys(x for row in rows for x in row) if x not in hidden]
    return [{x: row.get(x) for x in (*names, "note")} for row in rows]


class Step(NamedTuple):
    """Jobs of a kind: how they are found, measured, shown and, from a report, used; seconds of
    each, how many at once."""

    jobs: Callable[[Namespace], list[Job]]
    measured: Callable[[Job], Row]
    seconds: int
    at_once: Callable[[Job], int] = lambda job: 1
    shown: Callable[[list[Row]], list[Row]] = _shown
    advice: Callable[[Row], list[str]] = lambda report: []


def _memcheck_jobs(options: Namespace) -> list[Job]:
    """The first case of each kernel, where there is the tool."""
    if shutil.which("compute-sanitizer") is None:
        return []
    first = {(job.op, job.implementation): job for job in reversed(check.jobs(options))}
    return [job._replace(step="memcheck") for job in first.values()]


def _memcheck(job: Job) -> Row:
    """Fails where compute-sanitizer sees an access out of bounds."""
    line = ["compute-sanitizer", "--tool=memcheck", "--target-processes=all", "--error-exitcode=9"]
    line += [sys.executable, *PROGRAM, "--job", *job._replace(step="check")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    text = (done.stdout + done.stderr).strip().splitlines() or [""]
    return {"note": f"{programs.FAILED}{text[-1][:120]}" if done.returncode else ""}


def _model_jobs(options: Namespace) -> list[Job]:
    """Both models, by each implementation that trains and by XLA."""
    names = _MODELS if options.shapes in FOR_GPU else ("recall.gin", "recall_swa.gin")
    ways = dict.fromkeys((*options.implementation, "xla"))
    return [Job("step", "", gin, implementation=way) for way in ways for gin in names]


def _model_step(job: Job) -> Row:
    """Training steps of a model, of one row of tokens at 760M parameters."""
    ((row,),) = _bench_of(job).tables()
    return {x: row[x] for x in ("step ms", "tokens/s", "MFU %", "MiB")} | {"note": ""}


def _bench_of(job: Job) -> Any:
    from experiments.studies.bench.cases import Step as Bench

    attention = f"TransformerConfig.attention_implementation={job.implementation!r}"
    is_tiny = job.case not in _MODELS
    more: Any = Bench.quick["param"] if is_tiny else ("RunConfig.batch_size=1",)
    return Bench(gin=(job.case,), param=(*more, attention), rounds=3)


def _profile_jobs(options: Namespace) -> list[Job]:
    """The first of the models and implementations."""
    return [job._replace(step="profile") for job in _model_jobs(options)[:1]]


def _profile(job: Job) -> Row:
    """The longest kernels of a training step."""
    from experiments.studies.bench.cases import random_step

    (config,) = _bench_of(job).configs().values()
    step, _ = random_step(config)
    with programs.turn():
        step()
        return {"kernels": profile.kernels(step), "note": ""}


def _profiled(rows: Sequence[Row]) -> list[Row]:
    """A row per kernel."""
    names = ("kernel", "operation", "ms")
    return [dict(zip(names, x, strict=True)) for row in rows for x in row.get("kernels", [])]


STEPS = {
    "check": Step(check.jobs, check.measured, 120, cases.at_once, _shown, check.advice),
    "times": Step(bench.jobs, bench.measured, 240, cases.at_once, bench.shown),
    "memcheck": Step(_memcheck_jobs, _memcheck, 240, lambda job: 4),
    "step": Step(_model_jobs, _model_step, 300, lambda job: 4),
    "profile": Step(_profile_jobs, _profile, 300, shown=_profiled),
    "tiles": Step(tune.jobs, tune.measured, 300, cases.at_once, tune.ranked, tune.advice),
}

if __name__ == "__main__":
    main()
