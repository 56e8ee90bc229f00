"""The ops and their cases by options and jobs; the options that commands share."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from ttcd_kernels import launch, measure

from experiments.studies.kernels import attention, convolution, decoding
from experiments.studies.kernels.runner import Job

OPS: dict[str, Any] = {"dual_window": attention, "decode": decoding, "short_conv": convolution}
GPU_KERNELS = ("triton", "mosaic")


def parser_of(about: str, shapes: str, implementation: Sequence[str]) -> ArgumentParser:
    """The options that commands share; `shapes` and `implementation` are defaults."""
    parser = ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--op", choices=OPS, nargs="+", default=[*OPS], help="kernels of these ops")
    parser.add_argument("--implementation", nargs="+", default=[*implementation], help="which")
    parser.add_argument("--output", "--json", type=Path, help="the report, written as it grows")
    sets = ("tiny", "cpu", "paper")
    parser.add_argument("--shapes", choices=sets, default=shapes, help="a set of shapes to time")
    parser.add_argument("--case", nargs="+", default=[], help="names in the set")
    return parser


def parsed(parser: ArgumentParser, options: Namespace, is_timed: bool = True) -> None:
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
    is_for_gpu = is_timed and options.shapes == "paper"
    is_for_gpu = is_for_gpu or {*options.implementation} & {*GPU_KERNELS}
    if is_for_gpu and (reason := launch.unavailable()):
        parser.error(reason)


def chosen(options: Namespace) -> Iterator[tuple[str, Any]]:
    """(op, case) of the set of shapes."""
    for op in options.op:
        for case in OPS[op].SHAPES[options.shapes]:
            if not options.case or case.name in options.case:
                yield op, case


def case_of(job: Job) -> Any:
    """Cases of one name and dtype are one, in every set."""
    found = {x for shapes in OPS[job.op].SHAPES.values() for x in shapes}
    (case,) = (x for x in found if (x.name, x.dtype) == (job.case, job.dtype))
    return case


def at_once(job: Job) -> int:
    """The number of processes whose operands, and three times as much, fit in device memory."""
    shapes = OPS[job.op].operand_shapes(case_of(job))
    operands = sum(x.size * x.dtype.itemsize for x in shapes)
    return max(measure.usable_bytes() // (4 * operands), 1)
