"""RULER's 13 tasks: samples as NVIDIA's generator draws them, and their scores by task and length,
with the averages of the paper's tables."""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from absl import logging

from ttcd_jax import units
from ttcd_jax.config import DISTINCT, Bound, Positive, closest
from ttcd_jax.data.sources import text_records
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.inference.generate import Request
from ttcd_jax.inference.sampling import SamplingConfig
from ttcd_jax.measure.by_document import first_texts
from ttcd_jax.measure.pictures import Picture, plot_lines, save_figure
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Series, Subject, Task, digest, register
from ttcd_jax.tasks.ruler import prompts
from ttcd_jax.tasks.ruler.prompts import Cell, Drawing, Needles, Sources


class Kind(NamedTuple):
    """A task: how its prompts are drawn, the first characters of an answer's prefix, the most
    tokens of an answer, and whether one of the references suffices."""

    draw: Callable[[Cell, Sources, int], Drawing]
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
_QUESTIONS = {"qa_1": "squad", "qa_2": "hotpot"}
TASKS = {
    **{x: Kind(partial(prompts.find_needles, y), " The speci", 128) for x, y in _NEEDLES.items()},
    "vt": Kind(prompts.track_variables, " Answer: A", 30),
    "cwe": Kind(prompts.find_common_words, " Answer: T", 120),
    "fwe": Kind(prompts.find_coded_words, " Answer: A", 50),
    **{x: Kind(partial(prompts.ask, y), " Answer:", 32, True) for x, y in _QUESTIONS.items()},
}
SINGLE = tuple(name for name in TASKS if name.startswith("niah_single"))
NIAH = (*SINGLE, "niah_multikey_1", "niah_multivalue", "niah_multiquery")  # the paper's six
_GROUPS = {"all": tuple(TASKS), "niah": NIAH}
_DEPTHS = range(0, 100, 10)
_CONTROL = re.compile(r"[\x00-\x1f]")
_Length = Annotated[int, Bound("in 1 .. 2^24", lambda length: 0 < length <= 2**24)]


class Sample(NamedTuple):
    """A prompt, divided before the prefix of its answer, and the reference answers.

    `length`: tokens of the prompt and of the longest answer. `index` and `token_position_answer`:
    where the first reference is, in characters and in tokens, for needles; else the sample's
    number.
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
    kind, samples = TASKS[task], []
    cell = Cell(task, length, kind.num_new, seed, count)
    drawing = kind.draw(cell, sources, num_samples)
    for index, make in enumerate(drawing.prompts):
        prompt, size = cell.fitted(make, drawing)
        start = prompt.text.rfind(kind.prefix)
        text, prefix = prompt.text[:start], prompt.text[start:]
        place, position = index, None
        if task in _NEEDLES:  # the published files have the place of the answer as their index
            place = text.find(prompt.answers[0])
            position = count(text[:place])
        samples.append(Sample(text, prefix, tuple(prompt.answers), size, place, position))
    return samples


def score(prediction: str, answers: Sequence[str], *, takes_any: bool = False) -> float:
    """The share of `answers` that the prediction contains, in percent, whatever the case
    (`string_match_all`); with `takes_any`, 100 for one of them (`string_match_part`)."""
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    hits = [answer.lower() in text for answer in answers]
    return 100 * float(any(hits) if takes_any else np.mean(hits))


class Case(NamedTuple):
    """A sample of a task at a length."""

    task: str
    length: int
    number: int
    sample: Sample


class Answered(NamedTuple):
    """The score in percent of a prediction; `depth`: the percent of the text before the first
    answer, for needles."""

    task: str
    length: int
    sample: int
    depth: float | None
    score: float
    prediction: str
    answers: str


@register
class Ruler(Task[list[Case], Answered]):
    """RULER: `samples` of each of `tasks` (names, `niah` for the paper's six, `all`) at `lengths`,
    tokens of prompt and answer without bos, drawn by `seed`. Answers are greedy.

    Prose to hide needles in is `essay` (a text file, a folder, JSON lines, JSON), or the run's
    held-out text; `squad` and `hotpot` are the files of qa_1 and qa_2.
    """

    name = "ruler"
    title = "RULER: score by task and length"
    record = Answered
    key = "task"
    x_label = "length (tokens)"
    value = "score"
    shaping = ("samples", "seed")  # tasks and lengths may differ
    rank = 20

    tasks: str = "all"
    lengths: Annotated[tuple[_Length, ...], DISTINCT] = (4096,)
    samples: Positive = 100
    seed: Annotated[int, Bound("in 0 .. 2^32 - 1", lambda seed: 0 <= seed < 2**32)] = 42
    essay: str | None = None
    squad: str | None = None
    hotpot: str | None = None

    def validate(self) -> None:
        known = [*_GROUPS, *TASKS]
        for name in self.tasks.split(","):
            if name not in known:
                near = closest(name, known)
                raise UserError(f"RULER has no task {name!r}{near}: {', '.join(known)}")

    def rows(self, subject: Subject) -> list[Case]:
        """The samples in the order of lengths and tasks. A task whose source is missing, or whose
        smallest text does not fit, is left out of a group with a warning, and refused by name."""
        if (tokenizer := subject.tokenizer) is None:
            raise UserError(f"{subject.run_dir} has no tokenizer and RULER is text: take another")
        names = self.tasks.split(",")
        chosen = dict.fromkeys(task for name in names for task in _GROUPS.get(name, (name,)))
        drawn: dict[str, Any] = {
            "num_samples": self.samples,
            "count": lambda text: len(tokenizer.encode(text)),
            "sources": Sources(lambda: self._prose(subject, tokenizer), self.squad, self.hotpot),
            "seed": self.seed,
        }
        cases: list[Case] = []
        left_out: dict[str, None] = {}
        for length, task in itertools.product(self.lengths, chosen):
            try:
                samples = make_samples(task, length=length, **drawn)
                cases += [Case(task, length, *numbered) for numbered in enumerate(samples)]
            except UserError as error:
                if task in names or isinstance(error, DataError):
                    raise
                left_out[f"{task} is left out: {error}"] = None
        for line in left_out:
            logging.warning("%s", line)
        if not cases:
            raise UserError(f"RULER has no task here ({'; '.join(left_out)})")
        return cases

    def _prose(self, subject: Subject, tokenizer: Tokenizer) -> str:
        if self.essay is not None:
            return prompts.read_essay(self.essay)
        records = text_records(subject.run_dir, subject.data, tokenizer, None, "essay")
        return " ".join(first_texts(records, tokenizer, max(self.lengths)))

    def measure(self, scorer: Scorer, rows: list[Case], subject: Subject) -> Iterator[Answered]:
        """A record for each sample."""
        assert subject.tokenizer is not None, "rows refuses a run without one"
        requests, greedy = [], SamplingConfig(temperature=0)
        for case in rows:
            tokens = subject.tokenizer.encode(case.sample.prompt)
            most = TASKS[case.task].num_new
            requests.append(Request(tokens=tokens, sampling=greedy, max_new_tokens=most))
        for case, prediction in zip(rows, scorer.generate(requests), strict=True):
            task, length, number, sample = case
            depth = sample.depth if task in _NEEDLES else None
            points = score(prediction, sample.outputs, takes_any=TASKS[task].takes_any)
            answers = ", ".join(sample.outputs)
            yield Answered(task, length, number, depth, points, prediction, answers)

    @classmethod
    def columns(cls, series: Series[Answered]) -> dict[str, dict[Any, Any]]:
        """The mean score of every task, of all given, and of the paper's six, by variant and
        length; no mean where a task is missing."""
        columns = {
            f"{label}, {units.count(length)}" if len(series) > 1 else units.count(length): part
            for (label, length), part in _parts(series).items()
        }
        given = {record.task for records in columns.values() for record in records}
        rows = {task: [task] for task in TASKS if task in given}
        for what, group in (("", _GROUPS["all"]), (" needles", NIAH)):
            if parts := [task for task in group if task in given]:
                few = "" if len(parts) == len(group) else f"{len(parts)} of "
                rows[f"average of {few}{len(group)}{what}"] = parts
        return {
            name: {row: _mean(records, tasks) for row, tasks in rows.items()}
            for name, records in columns.items()
        }

    @classmethod
    def pictures(
        cls, folder: Path, series: Series[Answered], chance: float | None
    ) -> list[Picture]:
        parts = _parts(series)
        lengths = sorted({length for _, length in parts})
        tasks = [{record.task for record in part} for part in parts.values()]
        given, shared = set.union(*tasks), set.intersection(*tasks)
        lines, panels = {}, {}
        for label in series:
            at = [parts.get((label, length), []) for length in lengths]
            lines[label] = lengths, [_mean(x, shared) if shared else None for x in at]
            single = [[x for x in part if x.task in SINGLE] for part in at]
            panels[label] = [
                [_mean([x for x in y if low <= (x.depth or 0) < low + 10]) for y in single]
                for low in _DEPTHS
            ]
        path, title = folder / "ruler.svg", "RULER: mean score by length"
        plot_lines(path, title=title, x_label=cls.x_label, y_label="score (%)", series=lines)
        line = f"Mean score of the tasks given at every length ({len(shared)}), by length."
        pictures = [Picture(Path("ruler.svg"), line)]
        if given.intersection(SINGLE):
            plot_depths(folder / "depth.svg", lengths, panels)
            line = "Score of a single needle, by the share of the text before it and by length."
            pictures.append(Picture(Path("depth.svg"), line))
        return pictures

    def measured_on(self, rows: list[Case], subject: Subject) -> dict[str, str]:
        """By task and length."""
        parts: dict[str, list[Sample]] = {}
        for case in rows:
            parts.setdefault(f"{case.task}, {case.length}", []).append(case.sample)
        return {name: digest(samples) for name, samples in parts.items()}


def plot_depths(path: Path, lengths: Sequence[int], panels: dict[str, list[Any]]) -> None:
    """A panel of scores in percent per series, [depths, lengths]; None is left white."""
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)

    def draw(figure: Any) -> None:
        title = "A needle by its depth and the length of the text"
        figure.suptitle(title, weight="bold", x=0.01, ha="left")
        for number, (name, values) in enumerate(panels.items(), start=1):
            axes, cells = figure.add_subplot(rows, columns, number), np.array(values, float)
            image = axes.imshow(cells, cmap="viridis", vmin=0, vmax=100, aspect="auto")
            axes.set_xticks(range(len(lengths)), [units.count(x) for x in lengths])
            axes.set_yticks(range(len(_DEPTHS)), [f"{low}-{low + 10}" for low in _DEPTHS])
            axes.grid(visible=False)
            axes.set(xlabel=Ruler.x_label, ylabel="text before the needle (%)")
            axes.set_title(name, fontsize=11, weight="normal")
        figure.colorbar(image, ax=figure.axes, label="score (%)")

    save_figure(path, draw, size=(1.2 + 2.2 * columns, 2.6 * rows + 0.4))


def _parts(series: Series[Answered]) -> dict[tuple[str, int], list[Answered]]:
    """The records by (label, length)."""
    parts: dict[tuple[str, int], list[Answered]] = {}
    for label, records in series.items():
        for record in sorted(records, key=lambda x: x.length):
            parts.setdefault((label, record.length), []).append(record)
    return parts


def _mean(records: list[Answered], tasks: Collection[str] = ()) -> float | None:
    """The mean over tasks of their mean scores; None without records, or for one of `tasks`."""
    scores: dict[str, list[float]] = {task: [] for task in tasks}
    for record in records:
        if not tasks or record.task in scores:
            scores.setdefault(record.task, []).append(record.score)
    is_whole = scores and all(scores.values())
    return float(np.mean([np.mean(values) for values in scores.values()])) if is_whole else None
