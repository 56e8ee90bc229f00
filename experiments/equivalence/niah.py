"""RULER's needles in a haystack (Hsieh et al. 2024): prompts, answers, and their score.

A needle states the value of a key; needles are among repeated sentences (noise) or in prose
(essay), and the prompt ends just before the values of one or several keys. The wording is the
published one; keys and values come from our own lists and draws. A cell is a task at a length.
Answers are greedy; the score is the share, in percent, of the values asked for that an answer
contains, whatever the case (RULER's `string_match_all`).
"""

import bisect
import dataclasses
import itertools
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from experiments.equivalence.ways import Computed
from ttcd_jax.config import Bound, Config, Positive
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import UserError
from ttcd_jax.eval.scorer import batches

NUM_ANSWER_TOKENS = 128


class Task(NamedTuple):
    """The kind of haystack, its needles, and how many of them are asked for."""

    haystack: Literal["noise", "essay"]
    values: Literal["numbers", "uuids"] = "numbers"
    num_keys: int = 1
    num_values: int = 1  # of each key
    num_queries: int = 1


TASKS = {
    "niah_single_1": Task("noise"),
    "niah_single_2": Task("essay"),
    "niah_single_3": Task("essay", "uuids"),
    "niah_multikey_1": Task("essay", num_keys=4),
    "niah_multivalue": Task("essay", num_values=4),
    "niah_multiquery": Task("essay", num_keys=4, num_queries=4),
}
_TaskName = Annotated[str, Bound(f"one of {', '.join(TASKS)}", TASKS.__contains__)]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {values} for {key} is: {value}."
TEMPLATE = (
    "Some special magic {values} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {values} afterwards.\n{context}\nWhat are all the special magic "
    "{values} for {query} mentioned in the provided text? The special magic {values} for {query} "
    "mentioned in the provided text are"
)
_DEPTHS = np.linspace(0, 100, 40).round()  # percent of an essay's sentences
_SENTENCE, _CONTROL = re.compile(r"(?<=[.!?]) "), re.compile(r"[\x00-\x1f]")
_ADJECTIVES = """amber ample brave brisk calm clever coarse damp eager early faint fierce fluent
gentle glad grand hardy hasty humble idle jolly keen lively loyal mellow modest narrow neat noble
odd pale placid plain proud quaint quick rapid remote rustic shy silent sober steep sturdy sunny
tidy vivid wistful"""
_NOUNS = """anchor apron barrel basket beacon bridge candle canyon cellar copper cradle desert
engine falcon feather ferry garden glacier hammer harbor island jacket kettle ladder lantern meadow
mirror needle orchard paddle pebble pillow pocket quarry ribbon saddle shovel spider teapot thicket
timber tunnel valley velvet village wagon willow window"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NIAHConfig(Config):
    """A task at one length, in tokens: bos, prompt and the 128 of an answer. Sample i is a pure
    function of (seed, i), the tokenizer and the essay."""

    task: _TaskName
    length: Positive
    num_samples: Positive
    seed: int = 0


class Sample(NamedTuple):
    """A prompt, tokens [T] int32 with bos first, and the values that an answer must contain."""

    tokens: np.ndarray
    answers: tuple[str, ...]


def make_samples(config: NIAHConfig, tokenizer: Tokenizer, essay: str) -> list[Sample]:
    """The samples, each with the largest haystack that fits into `length` tokens. An essay that is
    too short is repeated.

    Raises `UserError` when the needles alone do not fit, or there is no essay for a task that hides
    in one.
    """
    words = essay.split()
    if TASKS[config.task].haystack == "essay" and not words:
        raise UserError(f"{config.task} hides its needles in prose and there is none: pass --text")
    rngs = (np.random.default_rng([config.seed, index]) for index in range(config.num_samples))
    return [_sample(config, tokenizer, words, rng) for rng in rngs]


def _sample(
    config: NIAHConfig, tokenizer: Tokenizer, words: list[str], rng: np.random.Generator
) -> Sample:
    task, room = TASKS[config.task], config.length - NUM_ANSWER_TOKENS
    pairs = list(itertools.product(_ADJECTIVES.split(), _NOUNS.split()))
    keys = ["-".join(pairs[i]) for i in rng.choice(len(pairs), task.num_keys, replace=False)]
    drawn = [(key, _value(rng, task.values)) for key in keys for _ in range(task.num_values)]
    needles = [NEEDLE.format(values=task.values, key=key, value=value) for key, value in drawn]
    rng.shuffle(needles)
    queries = [keys[i] for i in rng.choice(len(keys), task.num_queries, replace=False)]
    seed = int(rng.integers(2**32))  # of the needles' positions

    def tokens(size: int) -> np.ndarray:
        """The prompt with a haystack of `size` lines or words."""
        context = _hidden(needles, task, words, size, np.random.default_rng(seed))
        ids = tokenizer.encode(prompt_text(task, context, queries))
        return np.concatenate([np.array([tokenizer.bos_id], np.int32), ids])

    least = len(needles)
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
    answers = tuple(value for query in queries for key, value in drawn if key == query)
    return Sample(tokens(size), answers)


def prompt_text(task: Task, context: str, queries: list[str]) -> str:
    """The prompt in the published wording, singular when it asks for one value."""
    template, values = TEMPLATE, task.values
    if task.num_queries * task.num_values == 1:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        values = values.removesuffix("s")
    *first, last = queries
    query = f"{', '.join(first)}, and {last}" if first else last
    return template.format(values=values, context=context, query=query)


def _value(rng: np.random.Generator, kind: Literal["numbers", "uuids"]) -> str:
    if kind == "numbers":
        return str(rng.integers(10**6, 10**7))
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _hidden(
    needles: list[str], task: Task, words: list[str], size: int, rng: np.random.Generator
) -> str:
    """The haystack with its needles: `size` lines of noise, or the sentences of `size` words of
    the essay."""
    if task.haystack == "noise":
        sentences, joint = [NOISE] * size, "\n"
        positions = rng.choice(size, len(needles), replace=False)
    else:
        cycle = itertools.islice(itertools.cycle(words), size)
        sentences, joint = _SENTENCE.split(" ".join(cycle)), " "
        depths = rng.choice(_DEPTHS, len(needles), replace=False)
        positions = [int(len(sentences) * depth / 100) for depth in depths]
    for position, needle in zip(sorted(positions, reverse=True), reversed(needles), strict=True):
        sentences.insert(position, needle)
    return joint.join(sentences)


def score(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """The share of `answers` that the prediction contains, in percent, averaged over samples."""
    shares = [
        np.mean([value.lower() in _CONTROL.sub("\n", text.strip()).lower() for value in values])
        for text, values in zip(predictions, answers, strict=True)
    ]
    return 100 * float(np.mean(shares))


def compare_answers(
    reference: Computed,
    candidate: Computed,
    cell: NIAHConfig,
    tokenizer: Tokenizer,
    essay: str,
    *,
    batch_size: int,
) -> dict[str, Any]:
    """Both scores of a cell, and the share of samples that both ways answer alike, token by token
    up to the end of the document."""
    samples = make_samples(cell, tokenizer, essay)
    draft = np.zeros((len(samples), NUM_ANSWER_TOKENS), np.int32)
    outputs: dict[Computed, list[np.ndarray]] = {}
    # A way with a state answers first: a draft that forward passes of the other confirm.
    for way in sorted((reference, candidate), key=lambda way: way.way.path == "forward"):
        parts = []
        for index, count in batches(len(samples), batch_size):
            prompts = [samples[i].tokens for i in index]
            written = way.greedy(prompts, NUM_ANSWER_TOKENS, cell.length, draft[index])
            parts.append(written[:count])
        draft = np.concatenate(parts)
        outputs[way] = [ids[: [*ids, tokenizer.eos_id].index(tokenizer.eos_id)] for ids in draft]
    answers = [sample.answers for sample in samples]
    scores = [
        score([tokenizer.decode(ids) for ids in outputs[way]], answers)
        for way in (reference, candidate)
    ]
    same = map(np.array_equal, outputs[reference], outputs[candidate])
    return {
        "task": cell.task,
        "length": cell.length,
        "samples": len(samples),
        "reference_score": scores[0],
        "candidate_score": scores[1],
        "identical_share": float(np.mean([*same])),
    }
