"""Needles in a haystack: values of keys, hidden in noise, in prose, or among other needles."""

import bisect
import functools
import itertools
import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from ttcd_jax.tasks.ruler.documents import Sources
from ttcd_jax.tasks.ruler.search import Cell, Drawn, Prompt
from ttcd_jax.tasks.ruler.words import words_of

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {values} for {key} is: {value}."
_TEMPLATE = (
    "Some special magic {values} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {values} afterwards.\n{context}\nWhat are all the special magic "
    "{values} for {query} mentioned in the provided text? The special magic {values} for {query} "
    "mentioned in the provided text are"
)
_DEPTHS = np.linspace(0, 100, 40).round().astype(int).tolist()  # percent of the sentences

_Kind = Literal["words", "numbers", "uuids"]


class Needles(NamedTuple):
    """The kind of haystack, its needles, and how many keys are asked for."""

    haystack: Literal["noise", "essay", "needle"]
    keys: _Kind = "words"
    values: _Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1  # of each key
    num_queries: int = 1


def find_needles(needles: Needles, cell: Cell, sources: Sources, num_samples: int) -> Drawn:
    make = functools.partial(_prompt, cell, needles, sources)
    step = 500 if needles.haystack == "essay" else 5 if cell.is_short else 25
    size = cell.largest(make, step)
    for _ in range(num_samples):
        yield cell.fitted(make, size, step)


def _prompt(cell: Cell, needles: Needles, sources: Sources, size: int) -> Prompt:
    """`size`: lines of the haystack, or words of an essay."""
    keys, values, lines = [], [], []
    for _ in range(needles.num_keys):
        keys.append(_drawn(cell, needles.keys))
        values.append([_drawn(cell, needles.values) for _ in range(needles.num_values)])
        lines += [_line(needles, keys[-1], value) for value in values[-1]]
    cell.shuffle(lines)
    if needles.haystack == "essay":
        context = _among_sentences(cell, sources.sentences(size), lines)
    else:
        context = _among_lines(cell, needles, lines[0], size)
    chosen = cell.random.sample(range(needles.num_keys), needles.num_queries)
    *first, last = [keys[i] for i in chosen]
    template, kind = _TEMPLATE, str(needles.values)
    if needles.num_queries * needles.num_values == 1:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        kind = kind.removesuffix("s")
    query = f"{', '.join(first)}, and {last}" if first else last
    answers = [value for i in chosen for value in values[i]]
    return Prompt(template.format(values=kind, context=context, query=query), answers)


def _line(needles: Needles, key: str, value: str) -> str:
    return _NEEDLE.format(values=needles.values, key=key, value=value)


def _drawn(cell: Cell, kind: _Kind) -> str:
    if kind == "numbers":
        return str(cell.random.randint(10**6, 10**7 - 1))
    if kind == "words":
        return cell.random.choice(_pairs())
    return str(uuid.UUID(int=cell.random.getrandbits(128), version=4))


def _among_lines(cell: Cell, needles: Needles, line: str, size: int) -> str:
    if needles.haystack == "noise":
        hay = [NOISE] * size
    else:
        kinds = needles.keys, needles.values
        hay = [_line(needles, *(_drawn(cell, kind) for kind in kinds)) for _ in range(size)]
    (place,) = cell.random.sample(range(size), 1)
    hay.insert(place, line)
    return "\n".join(hay)


def _among_sentences(cell: Cell, sentences: Sequence[str], lines: list[str]) -> str:
    depths = cell.random.sample(_DEPTHS, len(lines))
    places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
    parts = [" ".join(sentences[: places[0]])]
    for line, start, stop in zip(lines, places, [*places[1:], len(sentences)], strict=True):
        parts += [line, " ".join(sentences[start:stop])]
    return " ".join(parts)


class Pairs(Sequence[str]):
    """Every "adjective-noun", sorted, without two that are equal; the six million are not made.

    All pairs of one adjective are in a row, except that those of "blue" enclose those of
    "blue-eyed": such adjectives share a block.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._blocks: list[tuple[str, list[str]]] = []
        for head in sorted({f"{adjective}-" for adjective in adjectives}):
            if self._blocks and head.startswith(self._blocks[-1][0]):
                first, tails = self._blocks.pop()
                more = [head.removeprefix(first) + noun for noun in self._nouns]
                self._blocks.append((first, sorted({*tails, *more})))
            else:
                self._blocks.append((head, self._nouns))
        self._stops = [*itertools.accumulate(len(tails) for _, tails in self._blocks)]

    def __len__(self) -> int:
        return self._stops[-1]

    def __getitem__(self, index: int) -> str:
        block = bisect.bisect_right(self._stops, index)
        head, tails = self._blocks[block]
        return head + tails[index - self._stops[block]]


@functools.cache
def _pairs() -> Pairs:
    return Pairs(words_of("adjective"), words_of("noun"))
