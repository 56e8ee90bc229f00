"""BABILong (Kuratov et al. 2024), qa1 to qa5: the facts of a question, hidden in a text of a given
number of tokens, and the accuracy of answers by task and length."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np

from ttcd_jax.config import DISTINCT, Bound, NonNegative, Positive
from ttcd_jax.data.compressed import import_for
from ttcd_jax.data.sources import text_records
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json
from ttcd_jax.inference.generate import Request
from ttcd_jax.inference.sampling import SamplingConfig
from ttcd_jax.measure.by_document import first_texts
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Series, Subject, Task, register
from ttcd_jax.tasks.babilong import stories
from ttcd_jax.tasks.babilong.stories import GIVERS, OBJECTS, PLACES, BabiTask, Question

Length = Literal["0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k"]
Form = Literal["official", "harness"]

_BACKGROUND_TOKENS = 2**24  # of the text, from the first on
MIN_SENTENCE = 10  # tokens

_WINDOW = 10  # characters per token of background
_MAX_DRAWS = 1000  # of texts without a sentence, one after the other; more of short ones


class Sample(NamedTuple):
    """A question with its text. Fact i precedes the sentence `fact_positions[i]` of the background,
    or follows the last; `index` is the number of the question among those of its size."""

    index: int
    facts: tuple[str, ...]
    question: str
    target: str
    references: tuple[str, ...]
    background: tuple[str, ...]
    fact_positions: tuple[int, ...]
    input: str


class Background:
    """The sentences of `texts`, each `encode`d after a blank.

    A draw of `default_rng(seed)` is a text, and the character where it begins; so many characters
    as `_WINDOW` times the tokens asked for are split by NLTK's untrained Punkt (Kiss and Strunk
    2006), without the first and the last sentence. Sentences that are not taken are the next ones.
    """

    def __init__(self, texts: Sequence[str], encode: Callable[[str], Any], seed: int) -> None:
        punkt = import_for("prose in sentences", "nltk.tokenize.punkt")
        assert texts, "no text"
        self._texts, self._encode = texts, encode
        self._rng = np.random.default_rng(seed)
        self._punkt = punkt.PunktSentenceTokenizer()
        self._sentences: Iterator[str] = iter(())

    def take(self, size: int) -> list[Any]:
        """The tokens of the next sentences of at least `MIN_SENTENCE` tokens, `size` in all: the
        last sentence is cut, to nothing for a size below 1. Raises `DataError` for texts without
        such sentences."""
        taken, left, num_draws = [], size, 0
        most = max(_MAX_DRAWS, 10**6 // max(abs(size), 5))
        while num_draws < most:
            for sentence in self._sentences:
                tokens = self._encode(" " + sentence)
                if len(tokens) >= MIN_SENTENCE:
                    taken.append(tokens[: max(left, 0)])
                    left, num_draws = left - len(tokens), 0
                    if left <= 0:
                        return taken
            num_draws += 1
            self._sentences = self._draw(_WINDOW * size)
        raise DataError(
            f"no sentence of {MIN_SENTENCE} tokens or more in {most:,} draws from a background of "
            f"{len(self._texts)} texts for {size} tokens: give longer prose (--background=PATH)"
        )

    def _draw(self, num_characters: int) -> Iterator[str]:
        """Sentences are split as they are taken."""
        text = self._texts[int(self._rng.integers(len(self._texts)))]
        start = int(self._rng.integers(len(text))) if text else 0
        text = text[start:][:num_characters]  # without its end for a negative number, as published
        spans = itertools.islice(self._punkt.span_tokenize(text), 1, None)
        return (text[a:b] for (a, b), _ in itertools.pairwise(spans))


def of_size(questions: Iterable[Question], size: int) -> list[Question]:
    """The questions of stories of at most one line per 8 tokens, their own included; 0: all."""
    return [x for x in questions if not size or len(x.facts) < size // 8]


def hide(
    questions: Iterable[tuple[int, Question]],
    texts: Sequence[str],
    tokenizer: Any,
    *,
    size: int,
    seed: int,
) -> Iterator[Sample]:
    """The samples of numbered questions: the facts and sentences of `texts`, together `size`
    tokens, or the facts alone for a size of 0. `tokenizer` has `encode` and `decode`, of tokens of
    any kind. Positions are uniform and may be equal. Facts of `size` tokens or more are all of the
    text, with one empty sentence. Two generators of `seed` draw, one of them positions."""
    encode = functools.lru_cache(2**17)(tokenizer.encode)
    rng = np.random.default_rng(seed)
    background = Background(texts, encode, seed) if size else None
    for index, question in questions:
        facts = [encode(" " + fact) for fact in question.facts]
        sentences = background.take(size - sum(map(len, facts))) if background else []
        positions = np.sort(rng.integers(len(sentences) + 1, size=len(facts))).tolist()
        pieces = [*sentences]
        for position, fact in zip(positions[::-1], facts[::-1], strict=True):
            pieces.insert(position, fact)
        tokens = [token for piece in pieces for token in piece]
        *shown, text = (tokenizer.decode(x).removeprefix(" ") for x in (*sentences, tokens))
        yield Sample(index, *question, tuple(shown), tuple(positions), text)


NEW_TOKENS: dict[Form, int] = {"official": 20, "harness": 16}
# The words of which every answer of a task is one.
LABELS: dict[BabiTask, tuple[str, ...]] = dict.fromkeys(get_args(BabiTask), PLACES)
LABELS["qa5"] = (*GIVERS, *OBJECTS)
_templates = functools.cache(lambda: read_json(Path(__file__).with_name("prompts.json")))


def prompt(form: Form, task: BabiTask, context: str, question: str) -> str:
    """The prompt word for word as in github booydar/babilong (Apache-2.0) for "official", as in
    the tasks babilong_qa1 to babilong_qa5 of EleutherAI's lm-evaluation-harness 0.4.13 (MIT), with
    two worked examples, for "harness"."""
    template = _templates()[form][task]
    return template.format(context=context.strip(), question=question.strip())


def is_right(form: Form, task: BabiTask, target: str, output: str, question: str) -> bool:
    """Whether the generated `output` answers `question` by `target`, capitals aside.

    official: of the labels of the task, its first sentence, up to another example, has the target
    alone; labels in the question do not count. harness: it has the target.
    """
    target, output, question = target.lower(), output.lower(), question.lower()
    if form == "harness":
        return target.strip() in re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip()
    sentence = re.split(r"\.|<context>|<example>", output)[0]
    labels = {label.lower() for label in LABELS[task]}
    return {x for x in labels if x in sentence and x not in question} == {target}


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
    y_label = "accuracy (%)"
    shaping = ("tasks", "lengths", "samples", "form", "max_new_tokens", "seed")
    sentence = "Questions about facts hidden in a text, mean of the tasks: higher is better."
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
            # Thousands of tokens, without those of the prompt around the text.
            size = max(0, 1000 * int(length.removesuffix("k")) - 300)
            numbered = enumerate(of_size(questions[task], size))
            found = hide(numbered, texts, tokenizer, size=size, seed=self.seed)
            fitting = (x for x in found if not size or any(x.background))
            chosen = [*itertools.islice(fitting, self.samples)]
            if len(chosen) < self.samples:
                raise UserError(
                    f"{task} has {len(chosen)} questions whose facts fit into {length} tokens, not "
                    f"{self.samples}: take fewer --samples, or longer --lengths"
                )
            for sample in chosen:
                text = prompt(self.form, task, sample.input, sample.question)
                cases.append(Case(task, length, sample, tokenizer.encode(text)))
        return cases

    def _questions(self, task: BabiTask) -> list[Question]:
        if self.babi is not None:
            return stories.read_folder(Path(self.babi), task)
        lines = stories.story_lines(task, self.seed, 4 * self.samples)  # some are too long
        return [*stories.read_questions(lines)]

    def measure(self, scorer: Scorer, rows: list[Case], subject: Subject) -> Iterator[Answered]:
        most = self.max_new_tokens or NEW_TOKENS[self.form]
        options = {"sampling": SamplingConfig(temperature=0), "max_new_tokens": most}
        outputs = scorer.generate([Request(tokens=case.prompt, **options) for case in rows])
        for (task, length, x, tokens), output in zip(rows, outputs, strict=True):
            is_hit = is_right(self.form, task, x.target, output, x.question)
            asked = x.index, len(tokens), x.question, x.target
            yield Answered(task, length, *asked, output, is_hit)

    def chance(self, subject: Subject) -> float:
        """The accuracy of one of the task's labels, drawn at random."""
        return 100 * fmean(1 / len(LABELS[task]) for task in self.tasks)

    @classmethod
    def columns(cls, series: Series[Answered]) -> dict[str, dict[Any, Any]]:
        """A column per length, and the average; by variant and task, and their average."""
        found: dict[str, dict[Any, Any]] = {}
        for name, records in series.items():
            for task, cells in _accuracies(records).items():
                for length, value in (cells | {"average": fmean(cells.values())}).items():
                    row = f"{name}, {task}" if len(series) > 1 else task
                    found.setdefault(length, {})[row] = value
        return found

    @classmethod
    def curves(cls, series: Series[Answered]) -> dict[str, tuple[list[Any], list[Any]]]:
        averages = {name: _accuracies(records)["average"] for name, records in series.items()}
        return {name: ([*x], [*x.values()]) for name, x in averages.items()}


def _accuracies(records: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """The accuracy in percent by task and length, and its average over the tasks."""
    hits: dict[str, dict[str, list[bool]]] = {}
    for record in records:
        hits.setdefault(record.task, {}).setdefault(record.length, []).append(record.is_right)
    cells = {task: {x: 100 * fmean(y) for x, y in row.items()} for task, row in hits.items()}
    lengths = next(iter(cells.values()))
    return cells | {"average": {x: fmean(row[x] for row in cells.values()) for x in lengths}}
