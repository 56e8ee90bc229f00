"""Results of an evaluation, on disk, and those of several runs together."""

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
import re
import shutil
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jax.experimental import multihost_utils
from ttcd_kernels.table import Row

from ttcd_jax import storage
from ttcd_jax.config import read_fields
from ttcd_jax.errors import DataError, NonFiniteError, UserError
from ttcd_jax.files import read_json, write_json, write_whole
from ttcd_jax.measure.answers import Measured, with_differences
from ttcd_jax.measure.journal import Journal
from ttcd_jax.measure.page import Section, published
from ttcd_jax.measure.task import Series, Subject, Task, find_task
from ttcd_jax.sharding.distributed import agree
from ttcd_jax.terminal import say

FILE = "results.json"
_UNFINISHED = ".unfinished"  # in the folder of results: the journal of answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Header:
    """Fields of a file of results that are read as they are; earlier versions lack some."""

    label: str
    method: str = ""  # the label of the model's method
    changes: str = ""  # of the trained model's configuration, in words
    options: dict  # of the task, JSON
    step: int = 0
    rows: int = 0
    chance: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results(_Header):
    """The records of every variant of a run's model by one task, in `eval/FOLDER` of the run
    directory. `measured_on`: the sha256 of the cases by part, None if that was not stored; `rows`:
    their number, `facts`: more about them, for JSON."""

    task: type[Task]
    run_dir: Path
    folder: str
    measured_on: dict[str, str | None] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    series: Series[Any] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The folder of the results."""
        return self.run_dir / "eval" / self.folder

    @property
    def table(self) -> list[Row]:
        return self.task.table(self.series) if self.series else []

    def renamed(self, label: str, name: str) -> "Results":
        """The results with series of a run called `name` instead of `label`."""
        series = {series_of(key, label, name): records for key, records in self.series.items()}
        return dataclasses.replace(self, series=series)

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        own = {"task": self.task.name, "run_dir": storage.shown(self.run_dir), "table": self.table}
        series = {label: [x._asdict() for x in records] for label, records in self.series.items()}
        return vars(self) | own | {"series": series}

    def write(self) -> Path:
        """Writes `results.json` (everything), `results.csv` (all series in one table) and the
        pictures of the task; returns their folder."""
        rows = ((label, *x) for label, records in self.series.items() for x in records)
        writer = csv.writer(table := io.StringIO())
        writer.writerow(["series", *self.task.record._fields])  # pyright: ignore
        writer.writerows([_cell(value) for value in row] for row in rows)
        write_whole(self.path / "results.csv", table.getvalue())
        write_json(self.path / FILE, self.to_dict())
        self.task.pictures(self.path, self.series, self.chance)
        shutil.rmtree(self.path / _UNFINISHED, ignore_errors=True)
        return self.path


def series_of(series: str, label: str, name: str) -> str:
    """The name of a series of a run that is called `name` instead of `label`."""
    return name + series[len(label) :] if series.startswith(label) else f"{name}, {series}"


def evaluate(task: Task, subject: Subject, step: int, folder: str | None = None) -> Results:
    """The records of every variant of a model, with their task, run and step. Answers are kept in
    the folder of results (a name in `eval` of the run, or a path; None: `folder_name`) until
    `Results.write`, so that the same evaluation goes on after an interruption; what was measured
    with the same options, at this step and on these cases is not measured again. Raises `UserError`
    where the results would replace another model's."""
    folder = folder or folder_name(task.name, subject.label or subject.changes)
    where = {"run_dir": storage.to_path(subject.run_dir).absolute(), "folder": folder, "step": step}
    names = {"label": subject.name, "method": subject.model.config.label}
    names["changes"] = subject.changes
    result = Results(task=type(task), options=task.to_dict(), **names, **where)
    old, path = _replaced(result), result.path / FILE
    rows = task.rows(subject)
    measured_on = task.measured_on(rows, subject)
    result = dataclasses.replace(result, measured_on=measured_on)
    mesh = {"mesh": str(jax.sharding.get_mesh().shape)}
    agree("evaluation", result.options | result.to_dict() | mesh)
    is_measured = old is not None and _measured(old) == _measured(result)
    if multihost_utils.broadcast_one_to_all(is_measured):
        say(f"measured before: remove {result.path} to measure it again")
        return dataclasses.replace(old or result, run_dir=result.run_dir, folder=result.folder)
    if old is not None and differing([old.measured_on, measured_on]):
        logging.warning("%s was measured on other text, or other rows of it: it is replaced", path)
    if jax.process_index() == 0:
        for name, content in task.files(rows).items():
            write_whole(result.path / name, content)
    journal = Journal(result.path / _UNFINISHED, [task.name, result.options])
    series = task.series(subject._replace(journal=journal), rows)
    _check_finite(task, series, step)
    num_rows = len(rows if isinstance(rows, list) else jax.tree.leaves(rows)[0])
    found = {"rows": num_rows, "facts": task.facts(rows), "chance": task.chance(subject)}
    return dataclasses.replace(result, series=series, **found)


def _measured(results: Results) -> Any:
    """What was measured: the step, the cases, and the options, without the rows of a batch unless
    they matter."""
    options = results.options | ({} if results.task.is_by_batch else {"batch_size": None})
    return results.step, results.measured_on, json.dumps(options, sort_keys=True)


def _check_finite(task: Task, series: Series[Any], step: int) -> None:
    """Raises `NonFiniteError` for measures that JSON has no number for, `UserError` for none."""
    if not all(series.values()):
        raise UserError(f"task {task.name} finds nothing to measure in these rows: take others")
    for label, record in ((x, record._asdict()) for x in series for record in series[x]):
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise NonFiniteError(
                    f"task {task.name}: {name} of {label} is {value} at step {step}, in the "
                    f"record {record}: the model diverged, evaluate an earlier --step (a task of "
                    "your own: None for the mean of nothing)"
                )


def _replaced(result: Results) -> Results | None:
    """The results in the same folder; None if there are none, or damaged ones. Raises `UserError`
    for those of a model under another label or changes."""
    path = result.path / FILE
    try:
        old = read_results(path)
    except DataError:  # there is none, too
        return None
    for name in ("label", "changes"):
        if (found := getattr(old, name)) != (new := getattr(result, name)):
            raise UserError(f"{path} is of {name} {found!r}, not {new!r}: choose another --label")
    if old.step != result.step:
        logging.warning("%s of step %d is replaced by that of %d", path, old.step, result.step)
    return old


def folder_name(task: str, text: str) -> str:
    """The name of a folder of results: `<task>`, or `<task>.<text>` of a model with a label or
    changes. A text without any usable character, or a long one, is known by its digest."""
    short = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")
    if text and not 0 < len(short) <= 100:
        short = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{task}.{short}" if text else task


def _cell(value: Any) -> Any:
    """`value` for CSV; a text that a spreadsheet would compute begins with an apostrophe there."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def read_results(path: Path) -> Results:
    """The results in a file, which are of the folder where it lies now. Raises `UserError` for an
    unknown task, `DataError` for a file that is damaged."""
    found = read_json(path)
    if not isinstance(name := found.get("task"), str):
        raise DataError(f"{path} is damaged (it names no task): measure it again")
    task = find_task(name)
    facts = x if isinstance(x := found.get("facts"), dict) else {}
    if not isinstance(digests := found.get("measured_on"), dict):
        digests = {"": facts.get("documents")}  # all that earlier versions stored
    try:
        series = {x: [read_fields(task.record, y) for y in z] for x, z in found["series"].items()}
        if not series or not all(series.values()):
            raise ValueError("a series has no records")
        header = vars(read_fields(_Header, {"options": {}} | found))
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error!r}): measure it again") from error
    where = {"run_dir": path.parents[2], "folder": path.parent.name}
    found = {"measured_on": digests, "facts": facts, "series": series}
    return Results(task=task, **where, **header, **found)


def read_all_results(run_dirs: Sequence[Path]) -> dict[str, list[Results]]:
    """The results of every run, under its name: its label, or for several runs of the same label
    the label and the folder. The series of a result begin with the name."""
    folders, labels, found = [run_dir.name for run_dir in run_dirs], [], []
    for run_dir in run_dirs:
        found.append([*map(read_results, sorted((run_dir / "eval").glob(f"*/{FILE}")))])
        # The shortest label, of the unchanged model if there is one.
        order = ((bool(x.changes), len(x.label), x.label) for x in found[-1])
        labels.append(min(order, default=(run_dir.name,))[-1])
    named = {}
    for label, results, run_dir in zip(labels, found, run_dirs, strict=True):
        folder = run_dir.name if folders.count(run_dir.name) == 1 else run_dir
        name = label if labels.count(label) == 1 else f"{label} ({folder})"
        named[name] = [x.renamed(label, name) for x in results]
    return named


def merged(results: Sequence[Results]) -> Results:
    """The series of several runs by one task together. Raises as `check_comparable`."""
    check_comparable(results)
    series = {x: y for result in results for x, y in result.series.items()}
    return dataclasses.replace(results[0], series=series)


def check_comparable(results: Sequence[Results]) -> None:
    """Raises `UserError` for results of other cases or options, which share no table."""
    first, remedy = results[0], "evaluate both with the same options and text, or remove one"
    task = first.task
    expected = task.comparable(first.options, first.table)
    for result in results:
        if task.comparable(result.options, result.table) != expected:
            raise UserError(
                f"task {task.name}: {result.path} was evaluated with other options, or in other "
                f"buckets, than {first.path}: {remedy}"
            )
    if pair := differing([x.measured_on for x in results]):
        first, second, part = pair
        found = ((x.path, x.measured_on[part]) for x in (results[first], results[second]))
        texts = (f"{path} (sha256 {y[:12] if y else 'not stored'})" for path, y in found)
        raise UserError(
            f"task {task.name} was not measured on the same text in {' and '.join(texts)}: {remedy}"
        )


def differing(measured_on: Sequence[Mapping[str, str | None]]) -> tuple[int, int, str] | None:
    """The indices of two, and the part of which their digests differ, or are not known; None if all
    were measured on the same."""
    known: dict[str, int] = {}
    for index, parts in enumerate(measured_on if len(measured_on) > 1 else ()):
        for part, digest in parts.items():
            first = known.setdefault(part, index)
            if digest is None or digest != measured_on[first][part]:
                return first, index, part
    return None


def measured(runs: Mapping[str, list[Results]]) -> list[Measured]:
    """By task the series of every run, those of the lowest `rank` first."""
    tasks = {x.task for results in runs.values() for x in results}
    found = []
    for task in sorted(tasks, key=lambda x: (x.rank, x.name)):
        of_run = {name: [x.series for x in y if x.task is task] for name, y in runs.items()}
        series = {name: {0: dict(ChainMap(*parts))} for name, parts in of_run.items() if parts}
        found.append(Measured(task, task.title, series))
    return found


def task_sections(
    runs: Mapping[str, list[Results]],
    output: Path,
    between: Sequence[str] = (),
    controls: Mapping[str, str] | None = None,
) -> list[Section]:
    """A section for each task that some run was evaluated on, those of the lowest `rank` first;
    their pictures are drawn into `output`. `runs` is that of `read_all_results`. Tables have the
    differences on less off, and of every run from its control. After one of losses, the shares of
    the headroom `between` a control and a ceiling, where it has both. Raises `UserError` if none
    has."""
    sections, wholes = [], []
    for found in measured(runs):
        task, results = found.task, itertools.chain.from_iterable(runs.values())
        wholes.append(whole := merged([x for x in results if x.task is task]))
        drawn = task.pictures(output, whole.series, whole.chance)
        pictures = [x._replace(path=(output / x.path).absolute()) for x in drawn]
        table = with_differences(whole.table, found, controls or {})
        section = Section(task.title, table, pictures, published(task.name))
        sections.append(section._replace(is_detail=task.is_detail))
        if between:
            sections += headroom_sections(task, task.title, [whole.series], between)
    if between and len(sections) == len(wholes):
        both, labels = " and ".join(between), {x: None for whole in wholes for x in whole.series}
        remedy = f"name two of {', '.join(labels)}" if labels else "evaluate the runs first"
        raise UserError(f"no task has losses of both {both}: {remedy}")
    return sections


def headroom_sections(
    task: type[Task], title: str, seeds: Sequence[Series[Any]], between: Sequence[str]
) -> list[Section]:
    """The share of the headroom `between` two series, of losses of both, by all `seeds`."""
    table = task.headroom(seeds, *between) if {*between} <= {*seeds[0]} else []
    title = f"{title}: share of the headroom between {' and '.join(between)}"
    return [Section(title, table)] if table else []
