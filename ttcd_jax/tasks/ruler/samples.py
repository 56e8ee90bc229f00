"""RULER's 13 tasks: samples as NVIDIA's generator draws them, or from files in the published
layout, and their scores."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ttcd_jax.errors import DataError
from ttcd_jax.files import parse_json
from ttcd_jax.tasks.ruler.prompts import (
    Cell,
    Drawn,
    Needles,
    Sources,
    answer_questions,
    find_coded_words,
    find_common_words,
    find_needles,
    track_variables,
)

_CONTROL = re.compile(r"[\x00-\x1f]")
_MAX_LINE = 2**26  # bytes; what is longer is cut, and no JSON


class Ruler(NamedTuple):
    """A task: how its prompts are drawn, the first characters of an answer's prefix, the most
    tokens of an answer, and whether one of the references suffices."""

    draw: Callable[[Cell, Sources, int], Drawn]
    prefix: str
    num_new: int
    takes_any: bool = False


_NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", values="uuids"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_queries=4),
}
TASKS = {
    name: Ruler(functools.partial(find_needles, needles), " The speci", 128)
    for name, needles in _NEEDLES.items()
} | {
    "vt": Ruler(track_variables, " Answer: A", 30),
    "cwe": Ruler(find_common_words, " Answer: T", 120),
    "fwe": Ruler(find_coded_words, " Answer: A", 50),
    "qa_1": Ruler(functools.partial(answer_questions, "squad"), " Answer:", 32, takes_any=True),
    "qa_2": Ruler(functools.partial(answer_questions, "hotpot"), " Answer:", 32, takes_any=True),
}
SINGLE = tuple(name for name in TASKS if name.startswith("niah_single"))
NIAH = (*SINGLE, "niah_multikey_1", "niah_multivalue", "niah_multiquery")  # the paper's six


class Sample(NamedTuple):
    """A prompt, divided before the prefix of its answer, and the reference answers.

    `length`: tokens of the prompt and of the longest answer. `index` and `token_position_answer`:
    where the first reference is, in characters and in tokens, for needles; else the sample's
    number. They are not read from files.
    """

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int = 0
    index: int = 0
    token_position_answer: int | None = None

    @property
    def prompt(self) -> str:
        return self.input + self.answer_prefix

    @property
    def depth(self) -> float:
        """The position of the first reference in the prompt, in percent."""
        return 100 * max(self.input.find(self.outputs[0]), 0) / len(self.input)


def make_samples(
    task: str,
    *,
    length: int,
    num_samples: int,
    count: Callable[[str], int],
    sources: Sources,
    seed: int = 42,
) -> list[Sample]:
    """The samples of `task` with at most `length` tokens: prompt and answer, by `count`, which maps
    a text to its number of tokens. A seed, a length and a tokenizer give those of NVIDIA's
    generator, character by character; where that never ends, the task ends in an error.

    Raises `UserError` when the smallest text is longer, the source of the task is not given, or cwe
    takes more words than wonderwords has; `DataError` for a damaged source.
    """
    ruler, samples = TASKS[task], []
    cell = Cell(task, length, ruler.num_new, seed, count)
    for index, (prompt, size) in enumerate(ruler.draw(cell, sources, num_samples)):
        start = prompt.text.rfind(ruler.prefix)
        text, prefix = prompt.text[:start], prompt.text[start:]
        place, position = index, None
        if task in _NEEDLES:  # the published files have the place of the answer as their index
            place = text.find(prompt.answers[0])
            position = count(text[:place])
        samples.append(Sample(text, prefix, tuple(prompt.answers), size, place, position))
    return samples


def read_samples(path: Path, most: int) -> list[Sample]:
    """At most the first `most` samples of a file in the published layout. Raises `DataError` for a
    file that is missing, has none, or a line that is no sample."""
    samples = []
    try:
        with path.open("rb") as file:
            while len(samples) < most and (line := file.readline(_MAX_LINE)):
                samples.append(_sample(Path(f"{path}, line {len(samples) + 1}"), line))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not samples:
        raise DataError(f"{path} has no samples")
    return samples


def _sample(place: Path, line: bytes) -> Sample:
    record = parse_json(line, place)
    prompt, outputs = record.get("input"), record.get("outputs")
    prefix = record.get("answer_prefix", "")  # older files have it in the input
    is_whole = prompt and outputs and isinstance(outputs, list)
    texts = is_whole and all(isinstance(text, str) for text in (prompt, prefix, *outputs))
    if not texts or not all(text.strip() for text in outputs):  # an empty answer is in every text
        raise DataError(f"{place} is no sample of RULER: it needs the texts 'input' and 'outputs'")
    return Sample(prompt, prefix, tuple(outputs))


def score(prediction: str, answers: Sequence[str], *, takes_any: bool = False) -> float:
    """The share of `answers` that the prediction contains, in percent, whatever the case
    (`string_match_all`); with `takes_any`, 100 for one of them (`string_match_part`)."""
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    hits = [answer.lower() in text for answer in answers]
    return 100 * float(any(hits) if takes_any else np.mean(hits))
