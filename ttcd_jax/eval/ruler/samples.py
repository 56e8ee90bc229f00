"""Samples of RULER: their files, in the published layout, and their scores."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ttcd_jax.errors import DataError
from ttcd_jax.files import parse_json

_CONTROL = re.compile(r"[\x00-\x1f]")
_MAX_LINE = 2**26  # bytes


class Sample(NamedTuple):
    """A prompt, divided before the prefix of its answer, and the reference answers. `length`:
    tokens of the prompt and of the longest answer. For needles, `index` and `token_position_answer`
    are where the first reference is, in characters and in tokens."""

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int
    index: int
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
            while len(samples) < most and (line := file.readline(_MAX_LINE + 1)):
                samples.append(_sample(Path(f"{path}, line {len(samples) + 1}"), line))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not samples:
        raise DataError(f"{path} has no samples")
    return samples


def _sample(place: Path, line: bytes) -> Sample:
    if len(line) > _MAX_LINE:
        raise DataError(f"{place} has more than {_MAX_LINE} bytes")
    record = parse_json(line, place)
    prompt, prefix, outputs = record.get("input"), record.get("answer_prefix", ""), []
    if isinstance(record.get("outputs"), list):
        outputs = record["outputs"]
    length, index = record.get("length", 0), record.get("index", 0)
    is_text = all(isinstance(text, str) for text in (prompt, prefix, *outputs))
    if not (prompt and outputs and is_text and type(length) is type(index) is int):
        raise DataError(f"{place} is no sample of RULER: it needs the texts 'input' and 'outputs'")
    return Sample(prompt, prefix, tuple(outputs), length, index)


def score(prediction: str, answers: Sequence[str], *, takes_any: bool = False) -> float:
    """The share of `answers` that the prediction contains, in percent, whatever the case
    (`string_match_all`); with `takes_any`, 100 for one of them (`string_match_part`)."""
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    hits = [answer.lower() in text for answer in answers]
    return 100 * float(any(hits) if takes_any else np.mean(hits))
