"""Accuracy on BABILong, qa1 to qa5, by task and length."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from ttcd_kernels.table import Row

from ttcd_jax.config import DISTINCT, Bound, NonNegative, Positive
from ttcd_jax.data.sources import text_records
from ttcd_jax.errors import UserError
from ttcd_jax.inference.generate import Request
from ttcd_jax.inference.sampling import SamplingConfig
from ttcd_jax.measure.by_document import first_texts
from ttcd_jax.measure.pictures import Picture
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Series, Subject, Task, register
from ttcd_jax.tasks.babilong import samples
from ttcd_jax.tasks.babilong.samples import LABELS, Form, Sample
from ttcd_jax.tasks.babilong.stories import (
    BabiTask,
    Question,
    read_folder,
    read_questions,
    story_lines,
)

Length = Literal["0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k"]

_STORIES_PER_SAMPLE = 4  # of our own: some are too long
_BACKGROUND_TOKENS = 2**24  # of the text, from the first on


class Case(NamedTuple):
    """A sample and its prompt, tokens [T] without bos."""

    task: BabiTask
    length: Length
    sample: Sample
    prompt: np.ndarray


class Answered(NamedTuple):
    """A question and the model's answer; `tokens`: of the prompt."""

    task: str
    length: str
    index: int
    tokens: int
    question: str
    target: str
    output: str
    is_right: bool


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class BabiLong(Task[list[Case], Answered]):
    """Accuracy in percent of `samples` questions for each of `tasks` and `lengths`: "4k" is a text
    of 4000 - 300 tokens, "0k" one of the facts alone.

    `babi`: the folder of the bAbI files; None: stories of our own, of `seed`. `background`: a file
    of text, one of many documents, or a folder of .txt files; None: the run's held-out text.
    `form`: prompt and judgement of the authors, or of lm-evaluation-harness, with 20 or 16 tokens
    generated unless `max_new_tokens` says how many. `seed` also draws sentences and positions.
    """

    name = "babilong"
    title = "BABILong: accuracy (%) by length"
    record = Answered
    key = "task"
    x_label = "length (tokens)"
    rank = 25

    tasks: Annotated[tuple[BabiTask, ...], DISTINCT] = ("qa1", "qa2", "qa3", "qa4", "qa5")
    lengths: Annotated[tuple[Length, ...], DISTINCT] = ("0k", "1k", "2k", "4k")
    samples: Annotated[int, Bound("in 1 .. 100,000", lambda n: 0 < n <= 100_000)] = 100
    babi: str | None = None
    background: str | None = None
    form: Form = "official"
    max_new_tokens: Positive | None = None
    seed: NonNegative = 42

    def rows(self, subject: Subject) -> list[Case]:
        if (tokenizer := subject.tokenizer) is None:
            raise UserError(f"{subject.run_dir} has no tokenizer: babilong needs a run on text")
        texts: list[str] = []
        if {*self.lengths} != {"0k"}:
            where = subject.run_dir, subject.data, tokenizer, self.background, "background"
            texts = [*first_texts(text_records(*where), tokenizer, _BACKGROUND_TOKENS)]
        questions = {task: self._questions(task) for task in self.tasks}
        cases = []
        for task, length in itertools.product(self.tasks, self.lengths):
            size = samples.text_size(length)
            numbered = enumerate(samples.of_size(questions[task], size))
            found = samples.hide(numbered, texts, tokenizer, size=size, seed=self.seed)
            fitting = (x for x in found if not size or any(x.background))
            chosen = [*itertools.islice(fitting, self.samples)]
            if len(chosen) < self.samples:
                raise UserError(
                    f"{task} has {len(chosen)} questions whose facts fit into {length} tokens, not "
                    f"{self.samples}: take fewer --samples, or longer --lengths"
                )
            for sample in chosen:
                text = samples.prompt(self.form, task, sample.input, sample.question)
                cases.append(Case(task, length, sample, tokenizer.encode(text)))
        return cases

    def _questions(self, task: BabiTask) -> list[Question]:
        if self.babi is not None:
            return read_folder(Path(self.babi), task)
        return [*read_questions(story_lines(task, self.seed, _STORIES_PER_SAMPLE * self.samples))]

    def measure(self, scorer: Scorer, rows: list[Case], subject: Subject) -> list[Answered]:
        most = self.max_new_tokens or samples.NEW_TOKENS[self.form]
        options = {"sampling": SamplingConfig(temperature=0), "max_new_tokens": most}
        outputs = scorer.generate([Request(tokens=case.prompt, **options) for case in rows])
        records = []
        for (task, length, sample, tokens), output in zip(rows, outputs, strict=True):
            asked = sample.question, sample.target, output
            is_right = samples.is_right(self.form, task, *asked[1:], sample.question)
            records.append(Answered(task, length, sample.index, len(tokens), *asked, is_right))
        return records

    def chance(self, subject: Subject) -> float:
        """The accuracy of one of the task's labels, drawn at random."""
        return 100 * fmean(1 / len(LABELS[task]) for task in self.tasks)

    @classmethod
    def unit(cls, series: Series[Answered]) -> tuple[str, str]:
        return "is_right", "accuracy (%)"

    @classmethod
    def table(cls, series: Series[Answered]) -> list[Row]:
        """A row per variant and task, and their average; a column per length, and the average."""
        return [
            {cls.key: f"{name}, {task}" if len(series) > 1 else task}
            | cells
            | {"average": fmean(cells.values())}
            for name, records in series.items()
            for task, cells in _accuracies(records).items()
        ]

    @classmethod
    def curves(cls, series: Series[Answered]) -> dict[str, tuple[list[Any], list[Any]]]:
        averages = {name: _accuracies(records)["average"] for name, records in series.items()}
        return {name: ([*x], [*x.values()]) for name, x in averages.items()}

    @classmethod
    def picture(cls, path: Path, label: str) -> Picture:
        sentence = "Questions about facts hidden in a text, mean of the tasks: higher is better."
        return Picture(Path(path.name), sentence)

    @classmethod
    def comparable(cls, options: dict[str, Any], table: list[Row]) -> Any:
        files = "batch_size", "babi", "background"
        return {name: value for name, value in options.items() if name not in files}


def _accuracies(records: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """The accuracy in percent by task and length, and its average over the tasks."""
    hits: dict[str, dict[str, list[bool]]] = {}
    for record in records:
        hits.setdefault(record.task, {}).setdefault(record.length, []).append(record.is_right)
    cells = {task: {x: 100 * fmean(y) for x, y in row.items()} for task, row in hits.items()}
    columns = {x: [row[x] for row in cells.values()] for x in next(iter(cells.values()))}
    return cells | {"average": {x: fmean(column) for x, column in columns.items()}}
