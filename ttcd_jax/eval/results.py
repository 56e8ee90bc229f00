"""Results of an evaluation, on disk, and those of several runs together."""

import contextlib
import csv
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.eval.journal import Journal
from ttcd_jax.eval.page import Section
from ttcd_jax.eval.published import published
from ttcd_jax.eval.task import Subject, Task
from ttcd_jax.eval.tasks import TASKS
from ttcd_jax.files import read_json, write_json, write_whole

_UNFINISHED = ".unfinished"  # in the folder of results: the journal of answers


def evaluate(task: Task, subject: Subject, step: int) -> dict[str, Any]:
    """The records of every variant of a model, with their task, run and step. Answers are kept in
    the folder of results until `write_results`, so that the same evaluation goes on after an
    interruption."""
    rows, folder = task.rows(subject), _folder(subject.run_dir, task.name)
    if jax.process_index() == 0:
        for name, content in task.files(rows).items():
            write_whole(folder / name, content)
    journal = Journal(folder / _UNFINISHED, [task.name, task.to_dict()])
    series = task.series(subject._replace(journal=journal), rows)
    return {
        "task": task.name,
        "label": subject.name,
        "options": task.to_dict(),
        "run_dir": str(Path(subject.run_dir).absolute()),
        "step": step,
        "rows": len(rows if isinstance(rows, list) else jax.tree.leaves(rows)[0]),
        "facts": task.facts(rows),
        "chance": task.chance(subject),
        "table": task.table(series),
        "series": series,
    }


def write_results(result: dict[str, Any]) -> Path:
    """Writes `results.json` (everything), `results.csv` (all series in one table) and the pictures
    of the task into the run directory; returns their folder."""
    task, series = TASKS[result["task"]], result["series"]
    folder = _folder(result["run_dir"], task.name)
    table = io.StringIO()
    rows = [{"series": label} | record for label, records in series.items() for record in records]
    fields = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(table, fieldnames=[*fields])
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "results.csv", table.getvalue())
    task.pictures(folder, series, result["chance"])
    write_json(folder / "results.json", result)
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)
    return folder


def read_all_results(run_dirs: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The results of every run, under its name: its label, or for several runs of the same label
    the label and the folder. The series of a result begin with the name. Raises `DataError` for
    damaged results."""
    found = [[read_json(path) for path in _files(run_dir)] for run_dir in run_dirs]
    with _damage_named(run_dirs):
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


def _files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "eval").glob("*/results.json"))


def _label(results: Sequence[dict[str, Any]], run_dir: Path) -> str:
    """The label of a run: the shortest of its results, without their changes of the model."""
    return min((result["label"] for result in results), key=len, default=run_dir.name)


def _folder(run_dir: str | os.PathLike[str], task: str) -> Path:
    return Path(run_dir) / "eval" / task


@contextlib.contextmanager
def _damage_named(what: object) -> Iterator[None]:
    """Raises `DataError` where results of other fields, or of none, end in an error."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise DataError(
            f"results.json of {what} is damaged ({type(error).__name__}: {error}): evaluate again"
        ) from error


def merged(task: type[Task], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The series of several runs in one result. Raises `UserError` for results that cannot be
    compared."""
    first, series = results[0], {}
    for result in results:
        series |= result["series"]
        if task.comparable(result) != task.comparable(first):
            raise UserError(
                f"task {task.name}: {result['run_dir']} was evaluated in other buckets, or on "
                f"other text, than {first['run_dir']}: evaluate both with the same options"
            )
    return first | {"series": series}


def task_sections(runs: Mapping[str, list[dict[str, Any]]], output: Path) -> list[Section]:
    """A section for each task that some run was evaluated on, those of the lowest `rank` first;
    their pictures are drawn into `output`. `runs` is that of `read_all_results`."""
    sections = []
    for task in sorted(TASKS.values(), key=lambda task: task.rank):
        with _damage_named(f"task {task.name}"):
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
