"""The random numbers of one MAD data set, in the bits of the published generators."""

import numpy as np


class Draws:
    """The streams of a data set, which training rows begin and test rows continue: `generator` is
    `default_rng(seed)`, `legacy` numpy's global state after `seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = np.random.default_rng(seed)
        self.legacy = np.random.RandomState(seed)

    def below(self, n: int) -> int:
        """A number in 0 .. n - 1."""
        return int(self.generator.integers(n))
