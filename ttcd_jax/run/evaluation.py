"""Evaluation during training: the tasks of a run on its current parameters, as metrics."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from ttcd_jax.config import closest
from ttcd_jax.errors import DataError, UserError, listed
from ttcd_jax.files import read_json, write_json
from ttcd_jax.measure.results import Results, differing
from ttcd_jax.measure.task import Subject, Task
from ttcd_jax.run.build import untrained
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import EVALUATIONS, RunDirectory
from ttcd_jax.run.page import RunPage
from ttcd_jax.run.trackers import Guarded
from ttcd_jax.sharding.distributed import agree
from ttcd_jax.tasks import TASKS
from ttcd_jax.train.loop import StateCallback
from ttcd_jax.train.state import TrainState, with_params


def evaluation_callbacks(
    config: RunConfig,
    run_dir: RunDirectory,
    write: Callable[[int, dict[str, float]], None],
    batch_size: int,
) -> list[StateCallback]:
    """A callback that evaluates, every `evaluate_every` steps and after the last, at most
    `batch_size` rows at once, calls `write(steps done, metrics)`, each named TASK/VARIANT/BUCKET,
    and writes the page of the run, `index.html` in its directory; none without `evaluate_every`.
    Rows are made in advance, so a task that does not fit the data raises its `UserError` before the
    first step."""
    every = config.evaluate_every
    if every is None:
        return []
    tasks = [x.replace(batch_size=min(x.batch_size, batch_size)) for x in config.evaluations]
    subject = untrained(config, run_dir.path)
    inputs = [(task, task.rows(subject)) for task in tasks]
    _check_cases(run_dir.path / EVALUATIONS, inputs, subject)
    page = None if jax.process_index() else Guarded(RunPage(run_dir.path))

    def evaluate(step: int, state: TrainState) -> None:
        if step % every and step != config.steps:
            return  # the run was stopped; it will evaluate on time once resumed
        current = subject._replace(model=with_params(config.model, state["params"]))
        results = {}
        for task, rows in inputs:
            where = {"run_dir": run_dir.path, "folder": "", "step": step}
            names = {"label": current.name, "method": config.model.label}
            found = {"series": task.series(current, rows), "chance": task.chance(current)}
            options = {"task": type(task), "options": task.to_dict()}
            results[task.name] = Results(**options, **where, **names, **found)
        metrics = {
            f"{name}/{key}": value
            for name, x in results.items()
            for key, value in x.task.numbers(x.series).items()
        }
        write(step, metrics)
        if page is not None:
            page.call("write", step, results)
        if config.best_metric not in {None, *metrics}:
            near = closest(str(config.best_metric), [*metrics])
            raise UserError(
                f"no metric is RunConfig.best_metric {config.best_metric!r}{near}: go on from the "
                f"last good checkpoint with one of {listed([*metrics])} "
                "(--change=RunConfig.best_metric)"
            )

    return [StateCallback(every, evaluate)]


def _check_cases(path: Path, inputs: Sequence[tuple[Task, Any]], subject: Subject) -> None:
    """Raises `DataError` where a task would be measured on other cases than in the steps before;
    their digests are in `path`."""
    old = read_json(path) if path.is_file() else {}
    new = {}
    for task, rows in inputs:
        options = {x: y for x, y in task.to_dict().items() if x != "batch_size"}
        name = f"{task.name} {json.dumps(options, sort_keys=True)}"
        new[name] = task.measured_on(rows, subject)
        before = old.get(name, new[name])
        if not isinstance(before, dict) or differing([before, new[name]]):
            raise DataError(
                f"the text that task {task.name} measures {path.parent} on changed since its last "
                "step: restore it, or choose another --run_dir"
            )
    agree("evaluations", new)
    if jax.process_index() == 0 and new.keys() - old.keys():
        write_json(path, old | new)


def best_scores(config: RunConfig, records: Sequence[dict[str, Any]]) -> dict[int, float]:
    """{step: value of `best_metric`, the higher the better} of those of `records` that have it."""
    name = config.best_metric
    if name is None:
        return {}
    task = TASKS[name.split("/")[0]]
    sign = -1 if task.prefers_less(name) else 1
    scores = ((x["step"], x.get(name)) for x in records)  # null: it was not finite
    return {n: sign * x for n, x in scores if isinstance(x, int | float) and abs(x) < math.inf}
