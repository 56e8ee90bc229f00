"""The prompts of RULER's 13 tasks, by the draws of NVIDIA's generator in their order, and the texts
that they hide questions in: prose, and the documents of SQuAD and HotpotQA.

A task finds the largest text that fits into a length, then draws its samples. Every text that is
tried draws random numbers, so the search is a part of what a seed determines.
"""

import bisect
import copy
import functools
import itertools
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ttcd_jax.data.compressed import import_for
from ttcd_jax.data.corpus import CorpusConfig, load_documents
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json

_TEXTS: dict[str, str] = read_json(Path(__file__).with_name("prompts.json"))  # word for word
_DEPTHS = np.linspace(0, 100, 40).round().astype(int).tolist()  # percent of the sentences
_NUM_VARIABLES, _EXAMPLE_LENGTH, _EXAMPLE_VALUE = 5, 500, "12345"
_NUM_COMMON = 10
_TOKENS_PER_WORD = 50  # of the vocabulary
_ZETA_2 = math.pi**2 / 6
_FEW, _MOST = 100, 10_000  # draws of the smallest texts


class Question(NamedTuple):
    """A question and the numbers of its documents: its own, and others of the same article."""

    text: str
    answers: list[str]
    own: list[int]
    related: list[int]


Questions = tuple[list[Question], list[str]]  # in the order of the file; its documents, sorted


def read_essay(path: str) -> str:
    """The prose of a text file, a folder of .txt files, or the field `text` of JSON lines or of a
    JSON object."""
    if not Path(path).exists():
        raise DataError(f"there is no {path}: pass another --essay")
    if Path(path).suffix != ".json":
        config = CorpusConfig(kind="text", path=path, validation_percent=0)
        texts = (document.text for document in load_documents(config, "train"))
        return b" ".join(texts).decode(errors="replace")
    if not isinstance(text := read_json(Path(path)).get("text"), str):
        raise DataError(f"{path} has no text: give an object with the field 'text'")
    return text


def _squad(value: Any) -> Questions:
    """All answerable questions; documents are the paragraphs."""
    articles = [article["paragraphs"] for article in value["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    number = {text: index for index, text in enumerate(documents)}
    questions = []
    for article in articles:
        numbers = [number[paragraph["context"]] for paragraph in article]
        for own, paragraph in zip(numbers, article, strict=True):
            related = [index for index in numbers if index != own]
            asked = (x for x in paragraph["qas"] if not x["is_impossible"])
            pairs = ((x["question"], [answer["text"] for answer in x["answers"]]) for x in asked)
            questions += [Question(*pair, [own], related) for pair in pairs]
    return questions, documents


def _hotpot(value: Any) -> Questions:
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in x["context"]] for x in value]
    documents = sorted({text for own in texts for text in own})
    number = {text: index for index, text in enumerate(documents)}
    pairs = zip(value, ([number[text] for text in own] for own in texts), strict=True)
    return [Question(x["question"], [x["answer"]], own, []) for x, own in pairs], documents


_FILES: dict[str, tuple[str, type, Callable[[Any], Questions]]] = {
    "squad": ("dev-v2.0.json", dict, _squad),
    "hotpot": ("hotpot_dev_distractor_v1.json", list, _hotpot),
}


class Sources:
    """The texts that the user gave, read when a task needs them; `essay` returns the prose. Raises
    `UserError` for one that was not given, `DataError` for a file in another layout."""

    def __init__(
        self, essay: Callable[[], str], squad: str | None = None, hotpot: str | None = None
    ) -> None:
        self._essay, self._paths = essay, {"squad": squad, "hotpot": hotpot}
        self.questions = functools.cache(self._questions)
        # The samples of a cell share a size, except a few.
        self.sentences = functools.lru_cache(maxsize=4)(self._sentences)

    def _sentences(self, num_words: int) -> Sequence[str]:
        """The sentences of the first words of the essay, which begins again after its end."""
        punkt = import_for("prose in sentences", "nltk.tokenize.punkt")
        words = self._words * -(-num_words // len(self._words))
        return punkt.PunktSentenceTokenizer().tokenize(" ".join(words[:num_words]).strip())

    @functools.cached_property
    def _words(self) -> list[str]:
        if not (text := self._essay()).strip():
            raise UserError("there is no prose to hide needles in: pass --essay=FILE")
        return re.sub(r"\s+", " ", text).split(" ")

    def _questions(self, source: str) -> Questions:
        file, kind, parse = _FILES[source]
        if (path := self._paths[source]) is None:
            raise UserError(f"the questions are those of {file}: pass --{source}={file}")
        value = read_json(Path(path), kind)
        try:
            questions, documents = parse(value)
            if not (questions and all(one.answers for one in questions)):
                raise ValueError("no questions, or one without an answer")
            if not all(isinstance(x, str) for one in questions for x in (one.text, *one.answers)):
                raise TypeError("a question or an answer is no text")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise DataError(f"{path} is not in the layout of {file} ({problem})") from error
        return questions, documents


class Prompt(NamedTuple):
    """A whole prompt, with the prefix of the answer, and the reference answers."""

    text: str
    answers: list[str]


Make = Callable[[int], Prompt | None]  # a prompt of a size


class Drawing(NamedTuple):
    """The samples of a task: a prompt for each at most of a `size`, smaller by `step` down to
    `least` (None: `step`)."""

    prompts: Iterable[Make]
    size: int
    step: int
    least: int | None = None


class Cell:
    """One task at one length, and the state of its two random generators. Tasks have a short form
    below 4,096 tokens."""

    def __init__(
        self, name: str, length: int, num_new: int, seed: int, count: Callable[[str], int]
    ) -> None:
        self.name, self.length, self.num_new, self.count = name, length, num_new, count
        self.random, self.legacy = random.Random(seed), np.random.RandomState(seed)
        self._seed, self.is_short = seed, length < 4096

    def shuffle(self, items: list[str]) -> None:
        """Shuffles in place by its own generator: equal sizes get equal permutations."""
        random.Random(self._seed).shuffle(items)

    def names(self, letters: str, size: int, count: int) -> list[str]:
        """Random names of `size` letters, drawn until `count` of them differ."""
        names: list[str] = []
        while len(names) < count or len(set(names)) < count:
            names.append("".join(self.random.choices(letters, k=size)))
        return names

    def value(self) -> str:
        return str(self.legacy.randint(10_000, 99_999))

    def largest(self, make: Make, step: int, *, extra: int = 0, probe: int | None = None) -> int:
        """The largest size whose text and `extra` tokens fit, by bisection from `step` (if none
        fits) up to 3 times what a text of size `step` promises, or twice what one of `probe`."""
        per_unit = (self._num_tokens(make(probe or step)) - self.num_new) / (probe or step)
        high = int(self.length // per_unit) * 2 if probe else int((self.length / per_unit) * 3)
        low, high, best = step, max(high, 2 * step), step
        while low <= high:
            middle = (low + high) // 2
            if self._num_tokens(make(middle)) + extra <= self.length:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def fitted(self, make: Make, drawing: Drawing, may_exceed: bool = False) -> tuple[Prompt, int]:
        """A prompt of at most the size of `drawing`, and its tokens with those of an answer: a step
        smaller until it fits or has the least size, then drawn again. The published generator draws
        for ever; here, after 100 draws far too long, or 10,000, the last one is taken if it
        `may_exceed` the length, else `UserError` is raised."""
        _, size, step, least = drawing
        drawn: list[float] = []  # tokens of the smallest texts
        while len(drawn) < _MOST:
            num_tokens = self._num_tokens(prompt := make(size))
            if prompt is not None and num_tokens <= self.length:
                return prompt, int(num_tokens)
            if size > (step if least is None else least):
                size -= step
                continue
            drawn.append(num_tokens)
            if len(drawn) == _FEW and 4 * min(drawn) - 3 * max(drawn) > self.length:
                break
        if may_exceed and prompt is not None:
            return prompt, int(num_tokens)
        shortest = f"{min(drawn)} tokens" if min(drawn) < math.inf else "more tokens"
        raise UserError(
            f"{self.name} takes {shortest} at its smallest and has {self.length}: ask for longer "
            "contexts or a tokenizer of longer tokens, or leave it out"
        )

    def _num_tokens(self, prompt: Prompt | None) -> float:
        """The tokens of a prompt and an answer; None, a text that cannot be made, never fits."""
        return math.inf if prompt is None else self.count(prompt.text) + self.num_new


_Kind = Literal["words", "numbers", "uuids"]


class Needles(NamedTuple):
    """The kind of haystack (lines of noise, sentences of an essay, or other needles), its needles,
    and how many keys are asked for: values of keys, hidden in it."""

    haystack: Literal["noise", "essay", "needle"]
    keys: _Kind = "words"
    values: _Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1  # of each key
    num_queries: int = 1


def find_needles(needles: Needles, cell: Cell, sources: Sources, num_samples: int) -> Drawing:
    make = functools.partial(_needles_prompt, cell, needles, sources)
    step = 500 if needles.haystack == "essay" else 5 if cell.is_short else 25
    return Drawing([make] * num_samples, cell.largest(make, step), step)


def _needles_prompt(cell: Cell, needles: Needles, sources: Sources, size: int) -> Prompt:
    """`size`: lines of the haystack, or words of an essay."""
    keys, values, lines = [], [], []
    for _ in range(needles.num_keys):
        keys.append(_drawn(cell, needles.keys))
        values.append([_drawn(cell, needles.values) for _ in range(needles.num_values)])
        lines += [_line(needles, keys[-1], value) for value in values[-1]]
    cell.shuffle(lines)
    if needles.haystack == "essay":
        sentences, depths = sources.sentences(size), cell.random.sample(_DEPTHS, len(lines))
        ends = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        parts = [" ".join(sentences[: ends[0]])]
        for line, start, stop in zip(lines, ends, [*ends[1:], len(sentences)], strict=True):
            parts += [line, " ".join(sentences[start:stop])]
        context = " ".join(parts)
    else:
        hay = [_TEXTS["noise"]] * size
        if needles.haystack == "needle":
            kinds = needles.keys, needles.values
            hay = [_line(needles, *(_drawn(cell, kind) for kind in kinds)) for _ in range(size)]
        (index,) = cell.random.sample(range(size), 1)
        hay.insert(index, lines[0])
        context = "\n".join(hay)
    chosen = cell.random.sample(range(needles.num_keys), needles.num_queries)
    *first, last = [keys[i] for i in chosen]
    template, kind = _TEXTS["needles"], str(needles.values)
    if needles.num_queries * needles.num_values == 1:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        kind = kind.removesuffix("s")
    query = f"{', '.join(first)}, and {last}" if first else last
    answers = [value for i in chosen for value in values[i]]
    return Prompt(template.format(values=kind, context=context, query=query), answers)


def _line(needles: Needles, key: str, value: str) -> str:
    return _TEXTS["needle"].format(values=needles.values, key=key, value=value)


def _drawn(cell: Cell, kind: _Kind) -> str:
    if kind == "numbers":
        return str(cell.random.randint(10**6, 10**7 - 1))
    if kind == "words":
        return cell.random.choice(_pairs())
    return str(uuid.UUID(int=cell.random.getrandbits(128), version=4))


class Pairs(Sequence[str]):
    """Every "adjective-noun", sorted, without two that are equal; the six million are not made.

    All pairs of one adjective are in a row, except that those of "blue" enclose those of
    "blue-eyed": such adjectives share a block.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        nouns = sorted(set(nouns))
        self._blocks: list[tuple[str, list[str]]] = []
        for head in sorted({f"{adjective}-" for adjective in adjectives}):
            first, tails = head, nouns
            if self._blocks and head.startswith(self._blocks[-1][0]):
                first, tails = self._blocks.pop()
                tails = sorted({*tails, *(head.removeprefix(first) + noun for noun in nouns)})
            self._blocks.append((first, tails))
        self._stops = [*itertools.accumulate(len(tails) for _, tails in self._blocks)]

    def __len__(self) -> int:
        return self._stops[-1]

    def __getitem__(self, index: int) -> str:
        block = bisect.bisect_right(self._stops, index)
        head, tails = self._blocks[block]
        return head + tails[index - self._stops[block]]


@functools.cache
def _pairs() -> Pairs:
    return Pairs(_words_of("adjective"), _words_of("noun"))


def _words_of(kind: Literal["adjective", "noun", "verb"]) -> list[str]:
    """A list of the package wonderwords, in its order."""
    random_word = import_for("the list of words", "wonderwords.random_word")
    return random_word._get_words_from_text_file(f"{kind}list.txt")


def track_variables(cell: Cell, sources: Sources, num_samples: int) -> Drawing:
    """A chain of assignments in noise, after one example: a shorter text with its answers, at most
    500 tokens if the tokenizer allows it, which draws from the same generators."""
    step, short = 5 if cell.is_short else 10, copy.copy(cell)
    short.name, short.length, short.num_new = f"the example of {cell.name}", _EXAMPLE_LENGTH, 0
    make = functools.partial(_chain_prompt, short, is_example=True)
    found, _ = short.fitted(make, Drawing((), short.largest(make, 5), 5), may_exceed=True)
    example = f"{found.text} {' '.join(found.answers)}\n"
    size = cell.largest(functools.partial(_chain_prompt, cell), step, extra=cell.count(example))
    prompt = functools.partial(_after_example, cell, example)
    return Drawing([prompt] * num_samples, size, step)


def _after_example(cell: Cell, example: str, size: int) -> Prompt | None:
    """A prompt after the example, whose names and value are drawn anew."""
    if (prompt := _chain_prompt(cell, size)) is None:
        return None
    for name in example.split()[-_NUM_VARIABLES:]:
        (other,) = cell.names(string.ascii_uppercase, len(name), 1)
        example = example.replace(name, other)
    example = example.replace(_EXAMPLE_VALUE, cell.value())
    return Prompt(f"{example}\n{prompt.text}", prompt.answers)


def _chain_prompt(cell: Cell, size: int, *, is_example: bool = False) -> Prompt | None:
    """`size`: lines of noise; None for fewer than assignments, and for two names that are equal."""
    names = cell.names(string.ascii_uppercase, 3 if is_example else 5, _NUM_VARIABLES)
    value = _EXAMPLE_VALUE if is_example else cell.value()
    if len(names) > _NUM_VARIABLES and not is_example:
        cell.value()  # of the second chain that the published generator begins, and fails
    if len(names) > _NUM_VARIABLES or size < _NUM_VARIABLES:
        return None
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    lines = [_TEXTS["noise"]] * size
    places = sorted(cell.random.sample(range(size), _NUM_VARIABLES))
    for shift, (index, statement) in enumerate(zip(places, chain, strict=True)):
        lines.insert(index + shift, statement)
    context = "\n".join(lines).replace(". \n", ".\n")
    return Prompt(_TEXTS["chain"].format(context=context, value=value, count=_NUM_VARIABLES), names)


def find_common_words(cell: Cell, sources: Sources, num_samples: int) -> Drawing:
    """The common words of a numbered list. Raises `UserError` for texts of more words than
    wonderwords has: the published generator takes them from a list that is not public."""
    words = sorted({*_words_of("noun"), *_words_of("adjective"), *_words_of("verb")})
    cell.shuffle(words)
    make = functools.partial(_list_prompt, cell, words)
    return Drawing([make] * num_samples, cell.largest(make, 10, probe=4096), 10)


def _list_prompt(cell: Cell, words: list[str], size: int) -> Prompt:
    """One example and a list of `size` different words, of which it has ten more often."""
    if size > len(words):
        raise UserError(
            f"{cell.name} of {cell.length} tokens tries lists of {size} words and wonderwords has "
            f"{len(words)}: ask for shorter contexts"
        )
    head = ""
    example, times = ((20, 3, 1), (6, 1)) if cell.is_short else ((40, 10, 3), (30, 3))
    for num_words, num_common, num_others in (example, (size, *times)):
        drawn = cell.random.sample(words, num_words)
        common = drawn[:_NUM_COMMON]
        items = common * num_common + drawn[_NUM_COMMON:] * num_others
        cell.shuffle(items)
        text = f"{head}{_TEXTS['list'].format(context=_enumerated(items))}"
        head = f"{text} {_enumerated(common)}\n"
    return Prompt(text, common)


def _enumerated(items: list[str]) -> str:
    return " ".join(f"{number}. {item}" for number, item in enumerate(items, start=1))


def find_coded_words(cell: Cell, sources: Sources, num_samples: int) -> Drawing:
    """The frequent words of a coded text."""
    room = cell.length - cell.num_new
    if room < (least := 2 * _TOKENS_PER_WORD):
        takes = f"{cell.name} takes {least + cell.num_new} tokens or more and has {cell.length}"
        raise UserError(f"{takes}: ask for longer contexts, or leave it out")

    def prompt() -> Make:
        """Of random words of six letters by rank; the most frequent is the noise."""
        words = sorted({*cell.names(string.ascii_lowercase, 6, room // _TOKENS_PER_WORD)})
        cell.shuffle(words)
        return functools.partial(_coded_prompt, cell, ["...", *words[1:]])

    step, size, make = room // 32, room // 6, prompt()
    while (found := make(size)) and cell.count(found.text) < room:
        size += step
    return Drawing((prompt() for _ in range(num_samples)), size - step, step, least=0)


def _coded_prompt(cell: Cell, vocabulary: list[str], size: int) -> Prompt:
    """About `size` words, each as often as a zeta distribution of exponent 2 has its rank."""
    counts = (size * (np.arange(1, len(vocabulary) + 1) ** -2.0) / _ZETA_2).astype(int)
    items = np.repeat(vocabulary, counts).tolist()
    cell.shuffle(items)
    return Prompt(_TEXTS["coded"].format(context=" ".join(items)), vocabulary[1:4])


def ask(source: str, cell: Cell, sources: Sources, num_samples: int) -> Drawing:
    """A question of the file for each sample, in its order."""
    questions, documents = sources.questions(source)
    if num_samples > len(questions):
        raise UserError(
            f"--{source} has {len(questions)} questions for {num_samples} samples: ask for fewer"
        )
    asked = questions[:num_samples]
    prompts = [functools.partial(_question_prompt, cell, documents, x) for x in asked]
    return Drawing(prompts, cell.largest(prompts[0], 10), 10)


def _question_prompt(
    cell: Cell, documents: list[str], question: Question, size: int
) -> Prompt | None:
    """`size`: documents, the question's among them; more than the file has begin it again."""
    own, related = question.own, question.related
    num_more = size - len(own)
    if size >= len(documents):
        chosen = [index % len(documents) for index in range(size)]
    elif num_more < 0:
        return None
    elif num_more > len(related):
        known = {*own, *related}
        others = [index for index in range(len(documents)) if index not in known]
        chosen = [*own, *related, *cell.random.sample(others, num_more - len(related))]
    else:
        chosen = [*own, *cell.random.sample(related, num_more)]
    texts = [documents[index] for index in chosen]
    cell.shuffle(texts)
    context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(texts, start=1))
    return Prompt(_TEXTS["question"].format(context=context, query=question.text), question.answers)
