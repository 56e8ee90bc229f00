"""The size of a text: the largest that fits into a length, found as RULER finds it.

Every text that is tried draws random numbers, so the search is a part of what a seed determines.
"""

import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import numpy as np

_FEWEST, _MOST = 20, 2000  # draws of a text of the smallest published size


class Prompt(NamedTuple):
    """A whole prompt, with the prefix of the answer, and the reference answers."""

    text: str
    answers: list[str]


Drawn = Iterator[tuple[Prompt, int]]  # the samples of a task, with their numbers of tokens


class Cell:
    """One task at one length, and the state of its two random generators."""

    def __init__(self, length: int, num_new: int, seed: int, count: Callable[[str], int]) -> None:
        self.length, self.num_new, self.count = length, num_new, count
        self.random, self.legacy = random.Random(seed), np.random.RandomState(seed)
        self._seed = seed
        self.is_short = length < 4096  # tasks have a short form

    def part(self, length: int) -> Self:
        """A part of the prompt, without an answer, that draws from the same generators."""
        part = copy.copy(self)
        part.length, part.num_new = length, 0
        return part

    def shuffle(self, items: list[str]) -> None:
        """Shuffles in place by a generator of its own: equal sizes get equal permutations."""
        random.Random(self._seed).shuffle(items)

    def names(self, letters: str, size: int, count: int) -> list[str]:
        """Different random names of `size` letters, `count` of them."""
        draw = functools.partial(self.random.choices, letters, k=size)
        names = ["".join(draw()) for _ in range(count)]
        while len(set(names)) < count:
            names.append("".join(draw()))
        return list(dict.fromkeys(names))

    def largest(
        self,
        make: Callable[[int], Prompt | None],
        step: int,
        *,
        extra: int = 0,
        probe: int | None = None,
        most: Callable[[float], int] | None = None,
    ) -> int:
        """The largest size whose text and `extra` tokens fit, by bisection from `step` (if none
        fits) up to `most` of the tokens per unit of a text of size `probe`. A size that `make` has
        no text for is too large."""

        def tokens(size: int) -> float:
            prompt = make(size)
            return float("inf") if prompt is None else self.count(prompt.text)

        per_unit = tokens(probe or step) / (probe or step)
        high = int((self.length / per_unit) * 3) if most is None else most(per_unit)
        low, high, best = step, max(high, 2 * step), step
        while low <= high:
            middle = (low + high) // 2
            if tokens(middle) + extra + self.num_new <= self.length:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def fitted(
        self, make: Callable[[int], Prompt | None], size: int, step: int, *, least: int = 1
    ) -> tuple[Prompt, int]:
        """A prompt of at most `size`, `step` smaller until it fits, and its tokens with those of an
        answer. The published generator draws the smallest again until it fits, if ever; here it is
        halved once that is unlikely, down to `least`, which is returned even if it is too long."""
        drawn: list[int] = []  # tokens of the smallest texts so far
        while True:
            prompt = make(size)
            assert prompt is not None, f"the search found no text of size {size}"
            num_tokens = self.count(prompt.text) + self.num_new
            if num_tokens <= self.length:
                return prompt, num_tokens
            if size > step:
                size -= step
                continue
            drawn.append(num_tokens)
            spread = max(drawn) - min(drawn)
            if len(drawn) < _FEWEST or (min(drawn) - spread <= self.length and len(drawn) < _MOST):
                continue
            if size <= least:
                return prompt, num_tokens
            size = step = max(size // 2, least)
            drawn = []
