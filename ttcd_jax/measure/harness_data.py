"""The data sets of lm-evaluation-harness' own tasks in local files."""

import functools
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import parse_json

Row = dict[str, Any]
_MAX_LINE = 2**24  # bytes
_TEXTS = ("question", "subject", "activity_label", "ctx_a", "ctx_b")


class _Source(NamedTuple):
    stem: str
    scored: str  # the split of `<stem>.jsonl`; any split is in `<stem>_<split>.jsonl`
    read: Callable[[Row], tuple[Row, list[Any], Any]]  # (row as on the hub, choices, answer)


def _hellaswag(row: Row) -> tuple[Row, list[Any], Any]:
    names, label = ("activity_label", "ctx_a", "ctx_b", "endings"), int(row["label"])
    return {name: row[name] for name in names} | {"label": label}, row["endings"], label


def _arc(row: Row) -> tuple[Row, list[Any], Any]:
    """As on the hub, or with a list of `choices` and the index `gold`."""
    if isinstance(choices := row["choices"], dict):
        answer = choices["label"].index(row["answerKey"])
    else:
        choices, answer = {"text": choices, "label": [*string.ascii_uppercase]}, row["gold"]
        choices["label"] = choices["label"][: len(choices["text"])]
    key = {"question": row["question"], "answerKey": choices["label"][answer]}
    return key | {"choices": choices}, choices["text"], answer


def _mmlu(row: Row) -> tuple[Row, list[Any], Any]:
    if len(row["choices"]) != 4:
        raise ValueError("there are not four choices")
    names = ("subject", "question", "choices", "answer")
    return {name: row[name] for name in names}, row["choices"], row["answer"]


_SOURCES = {
    ("Rowan/hellaswag", None): _Source("hellaswag", "validation", _hellaswag),
    ("allenai/ai2_arc", "ARC-Easy"): _Source("arc_easy", "test", _arc),
    ("allenai/ai2_arc", "ARC-Challenge"): _Source("arc_challenge", "test", _arc),
    ("cais/mmlu", None): _Source("mmlu", "test", _mmlu),
}


class LocalData:
    """The rows of tasks from the files of `folder`, in place of the data sets of the hub."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and not self._folder.is_dir():
            raise DataError(f"--data={folder} is no folder")
        self._splits = functools.cache(self._read)

    def fields(self, config: Row) -> Row:
        """Replacements for fields of a task's configuration, none for a data set without a file
        here. Raises `UserError` for a task that has no row to score, `DataError` for a row of
        another data set."""
        path, name = config.get("dataset_path"), config.get("dataset_name")
        source = _SOURCES.get((path, name)) or _SOURCES.get((path, None))
        if source is None or not (splits := self._splits(source)):
            return {}
        found = {}
        for split, rows in splits.items():
            chosen = [row for row in rows if row.get("subject", name) == name]
            found |= {split: datasets.Dataset.from_list(chosen)} if chosen else {}
        if source.scored not in found:
            raise UserError(f"--data={self._folder} has no row of {config['task']} to score")
        uses = ("training_split", "validation_split", "fewshot_split")
        unused = {use: None for use in uses if config.get(use) not in found}
        return {"custom_dataset": lambda **_: found} | unused

    def _read(self, source: _Source) -> dict[str, list[Row]]:
        if self._folder is None:
            return {}
        names = ("train", "validation", "dev", "test")
        paths = {x: self._folder / f"{source.stem}_{x}.jsonl" for x in names}
        if (plain := self._folder / f"{source.stem}.jsonl").exists():
            paths[source.scored] = plain
        return {x: [*_rows(path, source)] for x, path in paths.items() if path.exists()}


def _rows(path: Path, source: _Source) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), start=1):
            where = f"{path}, line {number}"
            values = parse_json(line, Path(where))
            try:
                row, choices, answer = source.read(values)
                texts = [*choices, *(row[name] for name in _TEXTS if name in row)]
                is_text = all(isinstance(text, str) for text in texts)
                if not is_text or not all(map(str.strip, choices)):
                    raise ValueError("a text is missing or no string")
                if type(answer) is not int or not 0 <= answer < len(choices):
                    raise ValueError(f"the answer {answer!r} is none of {len(choices)} choices")
            except (LookupError, TypeError, ValueError) as error:
                raise DataError(f"{where} is no row of {source.stem}: {error!r}") from error
            yield row
