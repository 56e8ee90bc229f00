"""The random numbers of one MAD data set, in the bits of the published generators."""

import ctypes
from functools import partial

import numpy as np

_LOW_BITS = 2**32 - 1


class Draws:
    """The streams of a data set, which training rows begin and test rows continue.

    `generator` is `default_rng(seed)`; `legacy` is numpy's global state after `seed(seed)`.
    `below(n)` takes from the same stream as `generator`, in any order with its methods.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = np.random.default_rng(seed)
        self.legacy = np.random.RandomState(seed)
        source = self.generator.bit_generator.ctypes
        self._next_word = partial(source.next_uint32, ctypes.c_void_p(source.state_address))

    def below(self, n: int) -> int:
        """`generator.integers(0, n)`, 1 <= n < 2^32, to the bit and four times as fast.

        Lemire's method as numpy runs it: the upper word of word * n, drawn anew while the lower one
        is among the 2^32 mod n that would be too many. n = 1 draws nothing.
        """
        if n == 1:
            return 0
        product = self._next_word() * n
        if product & _LOW_BITS < n:
            surplus = 2**32 % n
            while product & _LOW_BITS < surplus:
                product = self._next_word() * n
        return product >> 32
