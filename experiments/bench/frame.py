"""Shared by the benchmark cases: the type of the table of cases, limits, units."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ttcd_kernels import measure

from ttcd_jax.config import Config

Row = dict[str, Any]
MILLISECOND, MIB, TERA = 1e-3, 2**20, 1e12
_ceilings = functools.cache(measure.ceilings)


class Case(NamedTuple):
    """A line of the table of cases: its options, those of --quick, its tables."""

    options: type[Config]
    quick: Row
    measured: Callable[..., Iterator[list[Row]]]


def over(value: float | None, unit: float | None) -> float | None:
    """The value in that unit, or over a baseline; None where one of them was not measured."""
    return None if value is None or unit is None else value / unit


def why_not_run(needed: int, flops: float, max_seconds: float) -> str:
    """The reason why a program of `needed` further bytes is only compiled; empty: it is run. The
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
