"""The base of the benchmark cases, and the limits that they share."""

import abc
import functools
from collections.abc import Iterator
from typing import ClassVar

from ttcd_kernels import measure
from ttcd_kernels.measure import Row

from experiments import cli
from ttcd_jax.config import Config
from ttcd_jax.run.bindings import load_config

_ceilings = functools.cache(measure.ceilings)


class Case(Config, abc.ABC):
    """A case, whose fields are its options."""

    quick: ClassVar[Row]  # values of fields under --quick

    @abc.abstractmethod
    def tables(self) -> Iterator[list[Row]]:
        """Measures and gives the tables, one after another."""


def loaded[C: Config](config: type[C], gin: str, param: tuple[str, ...]) -> C:
    """The configuration of a file of experiments/configs."""
    return load_config(config, gin, param, config_dir=cli.CONFIG_DIR)


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
