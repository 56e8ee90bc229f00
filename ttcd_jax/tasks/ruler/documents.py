"""The texts that RULER hides its questions in: prose, and the documents of SQuAD and HotpotQA."""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ttcd_jax.data.compressed import import_for
from ttcd_jax.data.corpus import CorpusConfig, load_documents
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json


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
            questions += [
                Question(x["question"], [answer["text"] for answer in x["answers"]], [own], related)
                for x in paragraph["qas"]
                if not x["is_impossible"]
            ]
    return questions, documents


def _hotpot(value: Any) -> Questions:
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in x["context"]] for x in value]
    documents = sorted({text for own in texts for text in own})
    number = {text: index for index, text in enumerate(documents)}
    questions = [
        Question(x["question"], [x["answer"]], [number[text] for text in own], [])
        for x, own in zip(value, texts, strict=True)
    ]
    return questions, documents


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
            texts = [x for one in questions for x in (one.text, *one.answers)]
            if not (questions and all(one.answers for one in questions)):
                raise ValueError("no questions, or one without an answer")
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a question or an answer is no text")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise DataError(f"{path} is not in the layout of {file} ({problem})") from error
        return questions, documents
