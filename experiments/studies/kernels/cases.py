"""The ops and their cases by options and jobs."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from ttcd_kernels import measure

from experiments.studies.kernels import attention, convolution, decoding
from experiments.studies.kernels.runner import Job

OPS: dict[str, Any] = {"dual_window": attention, "decode": decoding, "short_conv": convolution}
GPU_KERNELS = ("triton", "mosaic")
PEERS = ("cudnn", "jax.nn")  # prefixes of foreign implementations, which may refuse a shape
FOR_GPU = ("paper", "more")  # sets of shapes: those that all else depends on, the others


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
