"""Results of an evaluation, on disk, and the report of several runs."""

import csv
import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.eval.journal import Journal
from ttcd_jax.eval.report import Section, write_page
from ttcd_jax.eval.task import Subject, Task
from ttcd_jax.eval.tasks import TASKS
from ttcd_jax.files import read_json, write_json, write_whole

_UNFINISHED = ".unfinished"  # in the folder of results: the journal of answers


def evaluate(task: Task, subject: Subject, step: int) -> dict[str, Any]:
    """The records of every variant of a model, with their task, run and step. Answers are kept in
    the folder of results until `write_results`, so that the same evaluation goes on after an
    interruption."""
    rows = task.rows(subject)
    journal = Journal(
        _folder(subject.run_dir, task.name) / _UNFINISHED, [task.name, task.to_dict()]
    )
    subject = subject._replace(journal=journal)
    return {
        "task": task.name,
        "options": task.to_dict(),
        "run_dir": str(Path(subject.run_dir).absolute()),
        "step": step,
        "rows": len(rows if isinstance(rows, list) else jax.tree.leaves(rows)[0]),
        "chance": task.chance(subject),
        "series": task.series(subject, rows),
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


def read_results(run_dir: Path, task: str) -> dict[str, Any] | None:
    path = _folder(run_dir, task) / "results.json"
    return read_json(path) if path.exists() else None


def _folder(run_dir: str | os.PathLike[str], task: str) -> Path:
    return Path(run_dir) / "eval" / task


# What a table of other fields, or of none, ends in.
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, StopIteration)


def merged(task: type[Task], results: list[dict[str, Any]]) -> dict[str, Any]:
    """The series of several runs in one result. Raises `UserError` when their buckets differ."""
    first, series = results[0], {}
    for result in results:
        series |= result["series"]
        if task.comparable(result) != task.comparable(first):
            raise UserError(
                f"{result['run_dir']} was evaluated in other buckets than {first['run_dir']}: "
                "evaluate both at the same length"
            )
    return first | {"series": series}


def write_report(
    run_dirs: Sequence[Path], output: Path, next_steps: Sequence[str]
) -> list[Section]:
    """Writes the page and its pictures from the results of `run_dirs`; returns its sections, one
    for each task that some run was evaluated on. Raises `UserError` for a run without results,
    `DataError` for damaged ones."""
    results = {path: {name: read_results(path, name) for name in TASKS} for path in run_dirs}
    for path, by_task in results.items():
        if not any(by_task.values()):
            raise UserError(f"no evaluation in {path}: run experiments.evaluate first")
    sections = []
    for task in TASKS.values():
        found = [result for by_task in results.values() if (result := by_task[task.name])]
        if found:
            try:
                result = merged(task, found)
                if not all(result["series"].values()):
                    raise LookupError("a series without records")
                pictures = task.pictures(output, result["series"], result.get("chance"))
                sections.append(Section(task.title, task.table(result["series"]), pictures))
            except UserError:
                raise
            except _DAMAGE as error:
                raise DataError(
                    f"results.json of task {task.name} in {', '.join(map(str, run_dirs))} is "
                    f"damaged ({type(error).__name__}: {error}): evaluate again"
                ) from error
    write_page(
        output / "index.html",
        title="ttcd_jax report",
        summary="Runs: " + ", ".join(f"`{path}`" for path in run_dirs),
        sections=sections,
        next_steps=next_steps,
    )
    return sections
