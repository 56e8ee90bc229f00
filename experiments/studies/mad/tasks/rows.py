"""Rows of the MAD tasks, and the random numbers they are drawn from."""

from typing import Any, NamedTuple

import numpy as np

IGNORE = -100


class Rows(NamedTuple):
    """`inputs` and `targets`, int32 [N, T], of the host or a device; a target of -100 is not
    scored."""

    inputs: Any
    targets: Any


def shifted(x: np.ndarray, t: np.ndarray, is_training: bool) -> Rows:
    """Recall rows from sequences [N, T + 1] and the masked targets aligned with them: training asks
    for every next token, the test for the masked ones."""
    return Rows(x[:, :-1], (x if is_training else t)[:, 1:])


class Draws:
    """The random streams of a data set, bit-equal to the published ones, which training rows begin
    and test rows continue: `generator` is `default_rng(seed)`, `legacy` numpy's global state after
    `seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = np.random.default_rng(seed)
        self.legacy = np.random.RandomState(seed)

    def below(self, n: int) -> int:
        """A number in 0 .. n - 1."""
        return int(self.generator.integers(n))
