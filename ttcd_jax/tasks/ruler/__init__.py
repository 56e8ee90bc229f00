"""RULER (Hsieh et al. 2024): the 13 tasks at any length, for any tokenizer.

`make_samples` repeats the draws of NVIDIA's generator in their order, so that a seed, a length and
a tokenizer give its samples, character by character. Where that generator never ends, because its
smallest text is too long, the task ends in an error.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from ttcd_jax.tasks.ruler.documents import Sources, answer_questions
from ttcd_jax.tasks.ruler.niah import Needles, find_needles
from ttcd_jax.tasks.ruler.samples import Sample
from ttcd_jax.tasks.ruler.search import Cell, Drawn
from ttcd_jax.tasks.ruler.tracking import track_variables
from ttcd_jax.tasks.ruler.words import find_coded_words, find_common_words


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
    a text to its number of tokens.

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
