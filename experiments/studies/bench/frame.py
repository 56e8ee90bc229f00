"""The type of a benchmark case, and the limits that all cases share."""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ttcd_kernels import measure
from ttcd_kernels.measure import Row

from ttcd_jax.config import Config

_ceilings = functools.cache(measure.ceilings)


class Case(NamedTuple):
    """A case: the class of its options, their values under --quick, the generator of its tables."""

    options: type[Config]
    quick: Row
    measured: Callable[..., Iterator[list[Row]]]


def why_not_run(needed: int, flops: float, max_seconds: float) -> str:
    """The reason why a program of `needed` further bytes is only compiled; empty if it is run. The
    seconds of a call are estimated at the rate of a matrix product on this device."""
    limit = measure.usable_bytes()
    if needed > limit:
        return f"compiled only: does not fit in {measure.gibibytes(limit)}"
    if not max_seconds:
        return "compiled only"
    seconds = flops / _ceilings().flops_per_second
    if seconds > max_seconds:
        return f"compiled only: at least {seconds:.0f} s a call, the limit is {max_seconds:g} s"
    return ""
