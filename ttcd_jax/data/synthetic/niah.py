"""RULER's needles in a haystack (Hsieh et al. 2024): prompts that contain their answer.

A needle gives a value to a key; needles are among repeated sentences (noise) or in prose (essay),
and the prompt ends where the values of one or several keys have to follow. The wording is the
published one; keys and values come from our own lists and draws.
"""

import bisect
import dataclasses
import itertools
import re
import uuid
from typing import Literal, NamedTuple

import numpy as np

from ttcd_jax.config import Config, Positive
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import UserError

NUM_ANSWER_TOKENS = 128

TaskName = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multivalue",
    "niah_multiquery",
]


class Task(NamedTuple):
    """The kind of haystack, its needles, and how many of them are asked for."""

    haystack: Literal["noise", "essay"]
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1  # of each key
    num_queries: int = 1


TASKS: dict[TaskName, Task] = {
    "niah_single_1": Task("noise"),
    "niah_single_2": Task("essay"),
    "niah_single_3": Task("essay", "uuids"),
    "niah_multikey_1": Task("essay", num_keys=4),
    "niah_multivalue": Task("essay", num_values=4),
    "niah_multiquery": Task("essay", num_keys=4, num_queries=4),
}

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {values} for {key} is: {value}."
TEMPLATE = (
    "Some special magic {values} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {values} afterwards.\n{context}\nWhat are all the special magic "
    "{values} for {query} mentioned in the provided text? The special magic {values} for {query} "
    "mentioned in the provided text are"
)
_DEPTHS = np.linspace(0, 100, 40).round()  # percent of an essay's sentences
_SENTENCE = re.compile(r"(?<=[.!?]) ")
_ADJECTIVES = (
    *("amber", "ample", "brave", "brisk", "calm", "clever", "coarse", "damp", "eager", "early"),
    *("faint", "fierce", "fluent", "gentle", "glad", "grand", "hardy", "hasty", "humble", "idle"),
    *("jolly", "keen", "lively", "loyal", "mellow", "modest", "narrow", "neat", "noble", "odd"),
    *("pale", "placid", "plain", "proud", "quaint", "quick", "rapid", "remote", "rustic", "shy"),
    *("silent", "sober", "steep", "sturdy", "sunny", "tidy", "vivid", "wistful"),
)
_NOUNS = (
    *("anchor", "apron", "barrel", "basket", "beacon", "bridge", "candle", "canyon", "cellar"),
    *("copper", "cradle", "desert", "engine", "falcon", "feather", "ferry", "garden", "glacier"),
    *("hammer", "harbor", "island", "jacket", "kettle", "ladder", "lantern", "meadow", "mirror"),
    *("needle", "orchard", "paddle", "pebble", "pillow", "pocket", "quarry", "ribbon", "saddle"),
    *("shovel", "spider", "teapot", "thicket", "timber", "tunnel", "valley", "velvet", "village"),
    *("wagon", "willow", "window"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NIAHConfig(Config):
    """`length` counts tokens: prompt, bos and the 128 of an answer. Sample i is a pure function of
    (seed, i), of tokenizer and essay."""

    task: TaskName
    length: Positive
    num_samples: Positive
    seed: int = 0


class Sample(NamedTuple):
    """A prompt, its tokens [T] int32 with bos in front, and what an answer has to contain."""

    prompt: str
    tokens: np.ndarray
    answers: tuple[str, ...]


class _Puzzle(NamedTuple):
    """A sample before its haystack has a size: lines of noise, or words of an essay."""

    task: Task
    words: list[str]
    needles: list[str]
    queries: list[str]
    answers: tuple[str, ...]
    seed: int  # of the needles' positions

    def prompt(self, size: int) -> str:
        rng = np.random.default_rng(self.seed)
        if self.task.haystack == "noise":
            context = _in_noise(self.needles, size, rng)
        else:
            cycle = itertools.islice(itertools.cycle(self.words), size)
            context = _in_essay(self.needles, list(cycle), rng)
        return prompt_text(self.task, context, self.queries)


def make_samples(config: NIAHConfig, tokenizer: Tokenizer, essay: str) -> list[Sample]:
    """The samples, each with the largest haystack that fits into `length` tokens. An essay that is
    too short begins again.

    Raises `UserError` when the needles alone do not fit, or there is no essay for a task that hides
    in one.
    """
    task, words = TASKS[config.task], essay.split()
    if task.haystack == "essay" and not words:
        raise UserError(f"{config.task} hides its needles in prose and there is none: pass --text")
    rngs = (np.random.default_rng([config.seed, index]) for index in range(config.num_samples))
    return [_fitted(config, _puzzle(task, words, rng), tokenizer) for rng in rngs]


def _puzzle(task: Task, words: list[str], rng: np.random.Generator) -> _Puzzle:
    keys = _keys(rng, task.num_keys)
    values = {key: [_value(rng, task.values) for _ in range(task.num_values)] for key in keys}
    needles = [
        NEEDLE.format(values=task.values, key=key, value=value)
        for key in keys
        for value in values[key]
    ]
    rng.shuffle(needles)
    queries = [keys[i] for i in rng.choice(len(keys), task.num_queries, replace=False)]
    answers = tuple(value for key in queries for value in values[key])
    return _Puzzle(task, words, needles, queries, answers, int(rng.integers(2**32)))


def _fitted(config: NIAHConfig, puzzle: _Puzzle, tokenizer: Tokenizer) -> Sample:
    """The sample with the largest haystack that leaves room for the answer."""

    def tokens(size: int) -> np.ndarray:
        ids = tokenizer.encode(puzzle.prompt(size))
        return np.concatenate([np.array([tokenizer.bos_id], np.int32), ids])

    least, room = len(puzzle.needles), config.length - NUM_ANSWER_TOKENS
    needed = len(tokens(least)) + NUM_ANSWER_TOKENS
    if needed > config.length:
        raise UserError(
            f"{config.task} takes {needed} tokens with hardly any haystack and has "
            f"{config.length}: ask for longer contexts"
        )
    most = 2 * least
    while len(tokens(most)) <= room:
        most *= 2
    sizes = range(least, most)
    size = sizes[bisect.bisect_right(sizes, room, key=lambda size: len(tokens(size))) - 1]
    return Sample(puzzle.prompt(size), tokens(size), puzzle.answers)


def prompt_text(task: Task, context: str, queries: list[str]) -> str:
    """The published wording; one value asked for makes it singular."""
    template, values = TEMPLATE, task.values
    if task.num_queries * task.num_values == 1:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        values = values.removesuffix("s")
    *first, last = queries
    query = f"{', '.join(first)}, and {last}" if first else last
    return template.format(values=values, context=context, query=query)


def _keys(rng: np.random.Generator, count: int) -> list[str]:
    chosen = rng.choice(len(_ADJECTIVES) * len(_NOUNS), count, replace=False)
    pairs = (divmod(int(i), len(_NOUNS)) for i in chosen)
    return [f"{_ADJECTIVES[adjective]}-{_NOUNS[noun]}" for adjective, noun in pairs]


def _value(rng: np.random.Generator, kind: Literal["numbers", "uuids"]) -> str:
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _in_noise(needles: list[str], num_lines: int, rng: np.random.Generator) -> str:
    lines = [NOISE] * num_lines
    places = np.sort(rng.choice(num_lines, len(needles), replace=False))[::-1]
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _in_essay(needles: list[str], words: list[str], rng: np.random.Generator) -> str:
    sentences = _SENTENCE.split(" ".join(words))
    depths = np.sort(rng.choice(_DEPTHS, len(needles), replace=False))
    places = [0, *(int(len(sentences) * depth / 100) for depth in depths), len(sentences)]
    pieces = []
    for index, needle in enumerate([*needles, ""]):
        pieces += [*sentences[places[index] : places[index + 1]], needle]
    return " ".join(piece for piece in pieces if piece)
