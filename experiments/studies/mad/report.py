"""The scores of a MAD sweep beside the published ones: tables, footnotes, the picture of learning.

The score of a task is the mean over its settings of the best test accuracy (macro, by the protocol)
of a setting's learning rates and decays; with several seeds, their mean counts as one run.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ttcd_kernels.table import Row, format_table

from experiments.studies.mad.records import MAD_METHODS, Record, Run
from experiments.studies.mad.tasks import PUBLISHED, TASKS, TaskName, settings
from ttcd_jax.measure.page import Section
from ttcd_jax.measure.pictures import COLOURS, MARKERS, Picture, save_figure
from ttcd_jax.methods import METHODS

_COLUMNS = 3
_BY_LAYER = {"|eta S|/|W|": "memory_ratio", "beta": "gate_mean", "key rank": "key_rank"}


class Best(NamedTuple):
    """A pair of rate and decay as one run: the means over its seeds, and the curve of each, step
    and macro accuracy."""

    rate: float
    weight_decay: float
    means: dict[str, Any]
    curves: list[list[tuple[float, float]]]

    def __str__(self) -> str:
        accuracy = f"accuracy {self.means['macro_accuracy']:.3f}"
        return f"{accuracy} at rate {self.rate:g}, decay {self.weight_decay:g}"


def best_run(record: Record) -> Best | None:
    """The pair with the highest mean accuracy; None where every pair has a run that failed."""
    pairs: dict[tuple[float, float], list[Run]] = {}
    for run in record.runs:
        pairs.setdefault((run.rate, run.weight_decay), []).append(run)
    complete = []
    for pair, runs in pairs.items():
        measures = [run.metrics.to_dict() for run in runs if run.metrics is not None]
        if len(measures) == len(runs):
            scale = record.steps / record.epochs
            curves = [[(x.epoch * scale, x.macro_accuracy) for x in run.curve] for run in runs]
            complete.append(Best(*pair, _mean(measures), curves))
    return max(complete, key=lambda best: best.means["macro_accuracy"], default=None)


def _mean(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every measure that all have; empty for none."""
    names = [name for name in found[0] if all(name in x for x in found)] if found else ()
    return {name: np.mean([x[name] for x in found], axis=0) for name in names}


def means(records: Sequence[Record], task: str, method: str) -> tuple[dict[str, Any], np.ndarray]:
    """Of the best runs, over the settings that have one (the footnotes report how many runs
    failed): the mean of each measure, empty for none, and the mean curve [evaluations, 2], step and
    macro accuracy, up to the end of the shortest."""
    chosen = [record for record in records if (record.task, record.method) == (task, method)]
    found = [best for best in map(best_run, chosen) if best is not None]
    points = [*zip(*(curve for best in found for curve in best.curves), strict=False)]
    curve = np.mean(points, axis=1) if points else np.empty((0, 2))
    return _mean([best.means for best in found]), curve


def sweep_section(records: Sequence[Record], picture: Path) -> Section:
    """The scores and their picture, which is drawn."""
    draw_curves(picture, records)
    sentence = "Test accuracy of six synthetic tasks by step; hollow: published, at full budget. "
    sentence += ". ".join(footnotes(records)) + "."
    pictures = [Picture(Path(picture.name), sentence)]
    return Section("MAD: synthetic tasks", score_table(records), pictures)


def tables(records: Sequence[Record]) -> str:
    """The tables as text."""
    parts = ["\nMAD: best test accuracy over the runs of a setting, mean over settings, in percent"]
    parts += [format_table(score_table(records)), *footnotes(records)]
    if table := memory_table(records):
        parts.append("\nThe memory (best run of each setting, mean over settings)")
        parts.append(format_table(table))
    return "\n".join(parts) + "\n"


def score_table(records: Sequence[Record]) -> list[Row]:
    """A row per method, a column per task: macro accuracy / micro accuracy (published macro
    accuracy). The mean is over the tasks that have a score."""
    rows = []
    for method in _methods(records):
        found = {task: means(records, task, method)[0] for task in _tasks(records)}
        scores = {task: 100 * x["macro_accuracy"] for task, x in found.items() if x}
        published = {task: PUBLISHED[method][task] for task in scores if method in PUBLISHED}
        row = {"method": METHODS[method].label} | dict.fromkeys([*found, "mean"], "-")
        for task, score in scores.items():
            row[task] = f"{score:.1f} / {100 * found[task]['micro_accuracy']:.1f}"
            row["mean"] = f"{np.mean([*scores.values()]):.1f}"
        for task, score in published.items():
            row[task] += f" ({score:.1f})"
        if published:
            row["mean"] += f" ({np.mean([*published.values()]):.1f})"
        rows.append(row)
    return rows


def memory_table(records: Sequence[Record]) -> list[Row]:
    """A row per task and method with a memory that can be switched off: accuracy with it on and
    off (macro, percent), and by layer |eta S| / |W_base|, beta, and the keys' effective rank."""
    rows = []
    for task, method in itertools.product(_tasks(records), _methods(records)):
        found, _ = means(records, task, method)
        if "macro_accuracy_off" in found:
            row = {"task": task, "method": METHODS[method].label}
            row["on"] = f"{100 * found['macro_accuracy']:.1f}"
            row["off"] = f"{100 * found['macro_accuracy_off']:.1f}"
            for title, name in _BY_LAYER.items():
                row[title] = " ".join(f"{x:.3g}" for x in found.get(name, ())) or "-"
            rows.append(row)
    return rows


def footnotes(records: Sequence[Record]) -> list[str]:
    """The protocol, the budget and the options of the tables."""
    runs = [run for record in records for run in record.runs]
    done = Counter(task for task, _ in {(record.task, record.setting) for record in records})
    counts = (f"{task} {done[task]} of {len(settings(task))}" for task in _tasks(records))
    return [
        "cells: macro / micro accuracy on the test rows (published macro accuracy; all settings, "
        "200 epochs, 3 rates, 2 decays); means in brackets are ours, of the scores in brackets",
        f"settings: {', '.join(counts)}",
        *(f"budget of {', '.join(tasks)}: {text}" for text, tasks in _budgets(records).items()),
        f"runs: rates {_values(x.rate for x in runs)}, decays "
        f"{_values(x.weight_decay for x in runs)}, seeds {_values(x.seed for x in runs)}; "
        f"{sum(x.failed_at is not None for x in runs)} of {len(runs)} not finite, without a score",
        f"schedule {_values(x.recipe.schedule for x in records)}, score of the last epoch "
        "(published code: constant, of the lowest test loss, stops at accuracy 0.999)",
        f"initial standard deviation {_values(x.model.init_std for x in records)} "
        "(published: 0.02)",
        f"computed in {_values(x.model.precision.compute for x in records)} on "
        f"{_values(x.environment['device'] for x in records)}",
    ]


def _budgets(records: Sequence[Record]) -> dict[str, list[str]]:
    """A budget -> the tasks that were trained with it."""
    tasks_with: dict[str, list[str]] = {}
    for task in _tasks(records):
        chosen = [x for x in records if x.task == task]
        text = (
            f"{_span(x.steps for x in chosen)} steps ({_span(x.epochs for x in chosen)} epochs) of "
            f"{_span(x.recipe.batch_size for x in chosen)} rows, "
            f"{_span(x.num_train for x in chosen)} training rows (published: "
            f"{_span(x.published_num_train for x in chosen)}), "
            f"{_span(x.num_test for x in chosen)} test rows"
        )
        tasks_with.setdefault(text, []).append(task)
    return tasks_with


def _tasks(records: Sequence[Record]) -> list[TaskName]:
    return [task for task in TASKS if any(record.task == task for record in records)]


def _methods(records: Sequence[Record]) -> list[str]:
    return [name for name in MAD_METHODS if any(record.method == name for record in records)]


def _span(values: Iterable[int]) -> str:
    ordered = sorted(set(values))
    return " to ".join(f"{x:,}" for x in dict.fromkeys((ordered[0], ordered[-1])))


def _values(values: Iterable[Any]) -> str:
    """The distinct values as text, sorted."""
    return ", ".join(sorted(set(map(str, values))))


def draw_curves(path: Path, records: Sequence[Record]) -> None:
    """A PNG with a panel per task: macro accuracy on the test rows by step, a line per method; at
    the right edge, hollow, the published scores at full budget."""
    tasks, hollow = _tasks(records), {"markerfacecolor": "none", "markersize": 9, "linestyle": ""}
    num_rows = -(-len(tasks) // _COLUMNS)

    def draw(figure: Any) -> None:
        panels = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
        legend: dict[str, Any] = {}
        for axes, task in itertools.zip_longest(panels, tasks):
            if task is None:
                axes.set_axis_off()
                continue
            for index, method in enumerate(MAD_METHODS):
                steps, accuracy = means(records, task, method)[1].T
                look = {"color": COLOURS[index], "marker": MARKERS[index]}
                if len(steps):
                    label = METHODS[method].label
                    (line,) = axes.plot(steps, 100 * accuracy, label=label, markersize=4, **look)
                    legend.setdefault(label, line)
                if len(steps) and method in PUBLISHED:
                    score, right = PUBLISHED[method][task], 1.04 * steps[-1]
                    axes.plot([right], [score], clip_on=False, **look, **hollow)
            axes.set(title=task, xlabel="steps", ylim=(-2, 104))
        grey = {"marker": "o", "color": "#555555"}
        (legend["published, at full budget"],) = panels[0].plot([], **grey, **hollow)
        for axes in panels[::_COLUMNS]:
            axes.set_ylabel("macro accuracy, %")
        look = {"loc": "outside lower center", "ncols": 8, "frameon": False}
        figure.legend(legend.values(), legend.keys(), **look)

    save_figure(path, draw, size=(14, 3.9 * num_rows + 0.6), dpi=110)
