"""Samples of BABILong: the facts of a question, hidden in a text of a given number of tokens."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ttcd_jax.data.compressed import import_for
from ttcd_jax.errors import DataError
from ttcd_jax.files import read_json
from ttcd_jax.tasks.babilong.stories import GIVERS, OBJECTS, PLACES, BabiTask, Question

PROMPT_TOKENS = 300  # of a length, for the prompt around the text
MIN_SENTENCE = 10  # tokens

_TOKENS_PER_LINE = 8
_WINDOW = 10  # characters per token of background
_MAX_DRAWS = 1000  # of texts without a sentence, one after the other; more of short ones
_CACHED = 2**17  # sentences


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


def text_size(length: str) -> int:
    """The tokens of the text of "4k" and so on: thousands without the prompt's; 0 for "0k"."""
    return max(0, 1000 * int(length.removesuffix("k")) - PROMPT_TOKENS)


def of_size(questions: Iterable[Question], size: int) -> list[Question]:
    """The questions whose story is short enough for `size` tokens: one line per 8 tokens, the
    question included; all for a size of 0."""
    return [x for x in questions if not size or len(x.facts) < size // _TOKENS_PER_LINE]


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
    encode = functools.lru_cache(_CACHED)(tokenizer.encode)
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


Form = Literal["official", "harness"]

NEW_TOKENS: dict[Form, int] = {"official": 20, "harness": 16}
# The words of which every answer of a task is one.
LABELS: dict[BabiTask, tuple[str, ...]] = {"qa1": PLACES, "qa2": PLACES, "qa3": PLACES}
LABELS |= {"qa4": PLACES, "qa5": (*GIVERS, *OBJECTS)}
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
