"""The size of a text: the largest that fits into a length, found as RULER finds it.

Every text that is tried draws random numbers, so the search is a part of what a seed determines.
"""

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import numpy as np

from ttcd_jax.errors import UserError

_FEW, _MOST = 100, 10_000  # draws of the smallest texts


class Prompt(NamedTuple):
    """A whole prompt, with the prefix of the answer, and the reference answers."""

    text: str
    answers: list[str]


Drawn = Iterator[tuple[Prompt, int]]  # the samples of a task, with their numbers of tokens


class Cell:
    """One task at one length, and the state of its two random generators."""

    def __init__(
        self, name: str, length: int, num_new: int, seed: int, count: Callable[[str], int]
    ) -> None:
        self.name, self.length, self.num_new, self.count = name, length, num_new, count
        self.random, self.legacy = random.Random(seed), np.random.RandomState(seed)
        self._seed = seed
        self.is_short = length < 4096  # tasks have a short form

    def example(self, length: int) -> Self:
        """The cell of an example, without an answer, that draws from the same generators."""
        part = copy.copy(self)
        part.name, part.length, part.num_new = f"the example of {self.name}", length, 0
        return part

    def shuffle(self, items: list[str]) -> None:
        """Shuffles in place by a generator of its own: equal sizes get equal permutations."""
        random.Random(self._seed).shuffle(items)

    def names(self, letters: str, size: int, count: int) -> list[str]:
        """Random names of `size` letters, drawn until `count` of them differ."""
        draw = functools.partial(self.random.choices, letters, k=size)
        names = ["".join(draw()) for _ in range(count)]
        while len(set(names)) < count:
            names.append("".join(draw()))
        return names

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
        fits) up to `most` of the tokens per unit of a text of size `probe`."""
        probe = probe or step
        per_unit = (self._num_tokens(make(probe)) - self.num_new) / probe
        high = int((self.length / per_unit) * 3) if most is None else most(per_unit)
        low, high, best = step, max(high, 2 * step), step
        while low <= high:
            middle = (low + high) // 2
            if self._num_tokens(make(middle)) + extra <= self.length:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def fitted(
        self,
        make: Callable[[int], Prompt | None],
        size: int,
        step: int,
        least: int | None = None,
        *,
        may_exceed: bool = False,
    ) -> tuple[Prompt, int]:
        """A prompt of at most `size` and its tokens with those of an answer: `step` smaller until
        it fits or has at most `least` (default: `step`), then drawn again. The published generator
        draws for ever; here, after 100 draws far too long, or 10,000, the last one is taken if it
        `may_exceed` the length, else `UserError` is raised."""
        drawn: list[float] = []  # tokens of the smallest texts
        while len(drawn) < _MOST:
            num_tokens = self._num_tokens(prompt := make(size))
            if prompt is not None and num_tokens <= self.length:
                return prompt, int(num_tokens)
            if size > (step if least is None else least):
                size -= step
                continue
            drawn.append(num_tokens)
            if len(drawn) == _FEW and 4 * min(drawn) - 3 * max(drawn) > self.length:
                break
        if may_exceed and prompt is not None:
            return prompt, int(num_tokens)
        shortest = f"{min(drawn)} tokens" if min(drawn) < math.inf else "more tokens"
        raise UserError(
            f"{self.name} takes {shortest} at its smallest and has {self.length}: ask for longer "
            "contexts or a tokenizer of longer tokens, or leave it out"
        )

    def _num_tokens(self, prompt: Prompt | None) -> float:
        """The tokens of a prompt and an answer; None, a text that cannot be made, never fits."""
        return math.inf if prompt is None else self.count(prompt.text) + self.num_new
