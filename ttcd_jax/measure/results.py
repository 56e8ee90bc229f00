"""Results of an evaluation, on disk, and those of several runs together."""

import contextlib
import csv
import hashlib
import io
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from ttcd_jax.errors import DataError, NonFiniteError, UserError
from ttcd_jax.files import read_json, write_json, write_whole
from ttcd_jax.measure.journal import Journal
from ttcd_jax.measure.page import Section, published
from ttcd_jax.measure.task import TASKS, Series, Subject, Task
from ttcd_jax.sharding.distributed import agree

_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration)
_UNFINISHED = ".unfinished"  # in the folder of results: the journal of answers


def evaluate(task: Task, subject: Subject, step: int, output: str | None = None) -> dict[str, Any]:
    """The records of every variant of a model, with their task, run and step. Answers are kept in
    the folder of results until `write_results`, so that the same evaluation goes on after an
    interruption. `output`: that folder, a name in `eval` of the run or a path; None: `folder_name`.
    Raises `UserError` where the results would replace another model's."""
    result = {
        "task": task.name,
        "folder": output or folder_name(task.name, subject.label or subject.changes),
        "label": subject.name,
        "changes": subject.changes,
        "options": task.to_dict(),
        "run_dir": str(Path(subject.run_dir).absolute()),
        "step": step,
    }
    folder = _path(result)
    old = _replaced(folder / "results.json", result)
    rows = task.rows(subject)
    result["measured_on"] = task.measured_on(rows, subject)
    agree("evaluation", task.to_dict() | result | {"mesh": str(jax.sharding.get_mesh().shape)})
    if "series" in old and differing([old, result]):
        path = folder / "results.json"
        logging.warning("%s was measured on other text, or other rows of it: it is replaced", path)
    if jax.process_index() == 0:
        for name, content in task.files(rows).items():
            write_whole(folder / name, content)
    journal = Journal(folder / _UNFINISHED, [task.name, task.to_dict()])
    series = task.series(subject._replace(journal=journal), rows)
    _check_finite(task, series, step)
    return result | {
        "rows": len(rows if isinstance(rows, list) else jax.tree.leaves(rows)[0]),
        "facts": task.facts(rows),
        "chance": task.chance(subject),
        "table": task.table(series),
        "series": series,
    }


def _check_finite(task: Task, series: Series, step: int) -> None:
    """Raises `NonFiniteError` for measures that JSON has no number for, `UserError` for none."""
    if not all(series.values()):
        raise UserError(f"task {task.name} finds nothing to measure in these rows: take others")
    records = ((label, record) for label in series for record in series[label])
    found = ((*where, *item) for where in records for item in where[1].items())
    for label, record, name, value in found:
        if isinstance(value, float) and not math.isfinite(value):
            raise NonFiniteError(
                f"task {task.name}: {name} of {label} is {value} at step {step}, in the "
                f"record {record}: the model diverged, evaluate an earlier --step"
            )


def _replaced(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """The results at `path`; `result` if there are none, or damaged ones. Raises `UserError` for
    those of a model under another label or changes."""
    try:
        old = result | (read_json(path) if path.exists() else {})
    except DataError:
        return result
    for name in ("label", "changes"):
        if old[name] != result[name]:
            raise UserError(
                f"{path} is of {name} {old[name]!r}, not {result[name]!r}: choose another --label"
            )
    return old


def folder_name(task: str, text: str) -> str:
    """The name of a folder of results: `<task>`, or `<task>.<text>` of a model with a label or
    changes. A text without any usable character, or a long one, is known by its digest."""
    short = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")
    if text and not 0 < len(short) <= 100:
        short = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{task}.{short}" if text else task


def _path(result: dict[str, Any]) -> Path:
    return Path(result["run_dir"]) / "eval" / result["folder"]


def write_results(result: dict[str, Any]) -> Path:
    """Writes `results.json` (everything), `results.csv` (all series in one table) and the pictures
    of the task into the run directory; returns their folder."""
    task, series = TASKS[result["task"]], result["series"]
    folder = _path(result)
    table = io.StringIO()
    rows = [{"series": label} | record for label, records in series.items() for record in records]
    rows = [{name: _cell(value) for name, value in row.items()} for row in rows]
    fields = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(table, fieldnames=[*fields])
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "results.csv", table.getvalue())
    write_json(folder / "results.json", result)
    task.pictures(folder, series, result["chance"])
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)
    return folder


def _cell(value: Any) -> Any:
    """`value` for CSV; a text that a spreadsheet would compute begins with an apostrophe there."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def read_results(path: Path) -> dict[str, Any]:
    """A file of results, which are of the folder where it lies now."""
    return read_json(path) | {"run_dir": str(path.parents[2]), "folder": path.parent.name}


def read_all_results(run_dirs: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The results of every run, under its name: its label, or for several runs of the same label
    the label and the folder. The series of a result begin with the name. Raises `DataError` for
    damaged results."""
    files = [sorted((run_dir / "eval").glob("*/results.json")) for run_dir in run_dirs]
    found = [[*map(read_results, paths)] for paths in files]
    with damage_named(f"results.json of {', '.join(map(str, run_dirs))}"):
        labels = [_label(x, run_dir) for x, run_dir in zip(found, run_dirs, strict=True)]
        named = {}
        folders = [run_dir.name for run_dir in run_dirs]
        for label, results, run_dir in zip(labels, found, run_dirs, strict=True):
            folder = run_dir.name if folders.count(run_dir.name) == 1 else run_dir
            name = label if labels.count(label) == 1 else f"{label} ({folder})"
            for result in results:
                result["series"] = {
                    name + key[len(label) :] if key.startswith(label) else f"{name}, {key}": records
                    for key, records in result["series"].items()
                }
            named[name] = results
    return named


def _label(results: Sequence[dict[str, Any]], run_dir: Path) -> str:
    """The label of a run: the shortest of its results, of the unchanged model if there are any."""
    found = sorted((bool(x.get("changes")), len(x["label"]), x["label"]) for x in results)
    return found[0][-1] if results else run_dir.name


@contextlib.contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Raises `DataError` where the damaged content of `what`, a file, ends in an error."""
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"{what} is damaged ({cause}): measure it again") from error


def merged(task: type[Task], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The series of several runs in one result. Raises `UserError` for results that cannot be
    compared."""
    check_comparable(task, results)
    series = {x: y for result in results for x, y in result["series"].items()}
    return results[0] | {"series": series}


def check_comparable(task: type[Task], results: Sequence[dict[str, Any]]) -> None:
    """Raises `UserError` for results of other cases or options, which share no table."""
    first, remedy = results[0], "evaluate both with the same options and text, or remove one"
    for result in results:
        if task.comparable(result) != task.comparable(first):
            raise UserError(
                f"task {task.name}: {_path(result)} was evaluated with other options, or in other "
                f"buckets, than {_path(first)}: {remedy}"
            )
    if pair := differing(results):
        found = (f"{_path(x)} (sha256 {y[:12] if y else 'not stored'})" for x, y in pair)
        raise UserError(
            f"task {task.name} was not measured on the same text in {' and '.join(found)}: {remedy}"
        )


def differing(results: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str | None]]:
    """Two results, each with its digest, that were not measured on the same; none if all were."""
    known: dict[str, tuple[dict[str, Any], str | None]] = {}
    for result in results if len(results) > 1 else ():
        parts, facts = result.get("measured_on"), result.get("facts")
        if not isinstance(parts, dict):  # earlier versions stored the digest of documents alone
            parts = {"": facts.get("documents") if isinstance(facts, dict) else None}
        for part, digest in parts.items():
            pair = [known.setdefault(part, (result, digest)), (result, digest)]
            if pair[0][1] != digest or digest is None:
                return pair
    return []


def task_sections(runs: Mapping[str, list[dict[str, Any]]], output: Path) -> list[Section]:
    """A section for each task that some run was evaluated on, those of the lowest `rank` first;
    their pictures are drawn into `output`. `runs` is that of `read_all_results`."""
    sections = []
    for task in sorted(TASKS.values(), key=lambda task: task.rank):
        with damage_named(f"results.json of task {task.name}"):
            found = [x for results in runs.values() for x in results if x["task"] == task.name]
            if not found:
                continue
            result = merged(task, found)
            if not all(result["series"].values()):
                raise LookupError("a series without records")
            pictures = task.pictures(output, result["series"], result.get("chance"))
            table = task.table(result["series"])
            sections.append(Section(task.title, table, pictures, published(task.name)))
    return sections
