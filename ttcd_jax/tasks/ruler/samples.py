"""Samples of RULER: their files, in the published layout, and their scores."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ttcd_jax.errors import DataError
from ttcd_jax.files import parse_json

_CONTROL = re.compile(r"[\x00-\x1f]")
_MAX_LINE = 2**26  # bytes; what is longer is cut, and no JSON


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
        """The place of the first reference in the prompt, in percent."""
        return 100 * max(self.input.find(self.outputs[0]), 0) / len(self.input)


def sample_file(folder: Path, task: str, length: int) -> Path:
    """The file of a task at a length, in the folders of the published scripts."""
    return folder / f"ctx{length}" / task / "validation.jsonl"


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
