"""Stories in the format of bAbI (Weston et al. 2015): a numbered statement or question per line,
from 1 in every story; after a question, divided by tabs, its answer and the numbers of the
statements that support it."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ttcd_jax.data.documents import LeftOut, read_documents
from ttcd_jax.errors import DataError

BabiTask = Literal["qa1", "qa2", "qa3", "qa4", "qa5"]

_LINE = re.compile(r"([0-9]{1,6}) ([ -~]+)(?:\t([!-~][ -~]*)\t([0-9]{1,6}(?: [0-9]{1,6})*) ?)?\r?")


class Question(NamedTuple):
    """A question, the statements of its story before it, its answer, and the statements among them
    that support the answer, in their order."""

    facts: tuple[str, ...]
    question: str
    target: str
    references: tuple[str, ...]


def read_questions(lines: Iterable[str], where: str = "the stories") -> Iterator[Question]:
    """The questions of all stories in order. Raises `DataError`, with `where` and the number of the
    line, for a line of another format."""
    facts: dict[int, str] = {}
    last = 0
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        match = _LINE.fullmatch(line)
        index, text, target, support = match.groups() if match else ("0", "", None, None)
        if index == "1":
            facts, last = {}, 0
        chosen = {int(reference) for reference in (support or "").split()}
        if int(index) != last + 1 or not chosen <= facts.keys():
            raise DataError(
                f"{where}, line {number}: {line[:80]!r} is no line {last + 1} of a bAbI story ('1 "
                "Mary got the milk.' or, divided by tabs, '2 Who got it?', answer, statements)"
            )
        last += 1
        if target is None:
            facts[last] = text
            continue
        references = tuple(fact for index, fact in facts.items() if index in chosen)
        yield Question(tuple(facts.values()), text, target, references)


def read_folder(folder: Path, task: BabiTask) -> list[Question]:
    """The questions of the file `<task>_*_test.txt` in `folder`. Raises `DataError` for none or
    several, and for a file that is no bAbI stories."""
    found = sorted(folder.glob(f"{task}_*test.txt"))
    if len(found) != 1:
        raise DataError(
            f"{folder} has {len(found)} files {task}_*test.txt: give a folder with one, such as "
            "tasks_1-20_v1-2/en of bAbI"
        )
    (document,) = read_documents(found[0], found[0].name, "text", LeftOut())
    return [*read_questions(document.text.decode(errors="replace").split("\n"), str(found[0]))]
