"""Aggregation: the common words of a numbered list (cwe), the frequent words of a coded text (fwe);
and the lists of English words."""

import functools
import math
import string
from typing import Literal

import numpy as np

from ttcd_jax.data.compressed import import_for
from ttcd_jax.errors import UserError
from ttcd_jax.tasks.ruler.documents import Sources
from ttcd_jax.tasks.ruler.search import Cell, Drawn, Prompt

_LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
    "words in the above list? Answer: The top 10 words that appear most often in the list are:"
)
_CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text? Answer: According to the coded text above, the three most frequently appeared words are:"
)
_NUM_COMMON = 10
_TOKENS_PER_WORD = 50  # of the vocabulary
_ZETA_2 = math.pi**2 / 6


def words_of(kind: Literal["adjective", "noun", "verb"]) -> list[str]:
    """A list of the package wonderwords, in its order."""
    random_word = import_for("the list of words", "wonderwords.random_word")
    return random_word._get_words_from_text_file(f"{kind}list.txt")


def find_common_words(cell: Cell, sources: Sources, num_samples: int) -> Drawn:
    """Raises `UserError` for texts of more words than wonderwords has: the published generator
    takes them from a list that is not public."""
    words = sorted({*words_of("noun"), *words_of("adjective"), *words_of("verb")})
    cell.shuffle(words)
    make = functools.partial(_list_prompt, cell, words)
    size = cell.largest(make, 10, probe=4096, most=lambda x: int(cell.length // x) * 2)
    for _ in range(num_samples):
        yield cell.fitted(make, size, 10)


def _list_prompt(cell: Cell, words: list[str], size: int) -> Prompt:
    """One example and a list of `size` different words."""
    if size > len(words):
        raise UserError(
            f"{cell.name} of {cell.length} tokens tries lists of {size} words and wonderwords has "
            f"{len(words)}: ask for shorter contexts, or pass --data of the published scripts"
        )
    example = (20, 3, 1) if cell.is_short else (40, 10, 3)
    context, common = _numbered(cell, words, *example)
    head = f"{_LIST.format(context=context)} {_enumerated(common)}\n"
    context, common = _numbered(cell, words, size, *((6, 1) if cell.is_short else (30, 3)))
    return Prompt(head + _LIST.format(context=context), common)


def _numbered(
    cell: Cell, words: list[str], size: int, num_common: int, num_others: int
) -> tuple[str, list[str]]:
    """A numbered list of `size` different words, and the ten that it has more often."""
    drawn = cell.random.sample(words, size)
    common = drawn[:_NUM_COMMON]
    items = common * num_common + drawn[_NUM_COMMON:] * num_others
    cell.shuffle(items)
    return _enumerated(items), common


def _enumerated(items: list[str]) -> str:
    return " ".join(f"{number}. {item}" for number, item in enumerate(items, start=1))


def find_coded_words(cell: Cell, sources: Sources, num_samples: int) -> Drawn:
    room = cell.length - cell.num_new
    if room < (least := 2 * _TOKENS_PER_WORD):
        takes = f"{cell.name} takes {least + cell.num_new} tokens or more and has {cell.length}"
        raise UserError(f"{takes}: ask for longer contexts, or leave it out")
    step, size = room // 32, room // 6
    vocabulary = _vocabulary(cell, room)
    while cell.count(_coded_prompt(cell, vocabulary, size).text) < room:
        size += step
    size -= step
    for _ in range(num_samples):
        vocabulary = _vocabulary(cell, room)
        yield cell.fitted(functools.partial(_coded_prompt, cell, vocabulary), size, step, least=0)


def _vocabulary(cell: Cell, room: int) -> list[str]:
    """Random words of six letters by rank; the most frequent is the noise."""
    words = sorted({*cell.names(string.ascii_lowercase, 6, room // _TOKENS_PER_WORD)})
    cell.shuffle(words)
    return ["...", *words[1:]]


def _coded_prompt(cell: Cell, vocabulary: list[str], size: int) -> Prompt:
    """About `size` words, each as often as a zeta distribution of exponent 2 has its rank."""
    ranks = np.arange(1, len(vocabulary) + 1)
    counts = (size * (ranks**-2.0) / _ZETA_2).astype(int)
    items = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    cell.shuffle(items)
    return Prompt(_CODED.format(context=" ".join(items)), vocabulary[1:4])
