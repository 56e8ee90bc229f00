"""The picture of a MAD sweep: how each method learns each task, and the published scores."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies.mad.models import MAD_METHODS
from experiments.studies.mad.records import Record
from experiments.studies.mad.report import best_run, methods_of, tasks_of
from experiments.studies.mad.tasks.settings import PUBLISHED
from ttcd_jax.measure.pictures import COLOURS, MARKERS, save_figure
from ttcd_jax.methods import METHODS

_COLUMNS = 3


def mean_curve(records: list[Record]) -> np.ndarray:
    """[evaluations, 2]: step and macro accuracy, mean over records and the seeds of their best
    pairs of rate and decay, up to the end of the shortest; empty where no run stayed finite."""
    curves = []
    for record in records:
        steps, best = record["steps"] / record["epochs"], best_run(record)
        for curve in best["curves"] if best else ():
            curves.append([(point["epoch"] * steps, point["macro_accuracy"]) for point in curve])
    return np.mean([*zip(*curves, strict=False)], axis=1) if curves else np.empty((0, 2))


def draw_curves(path: Path, records: list[Record]) -> None:
    """A PNG with a panel per task: macro accuracy on the test rows by step, a line per method; at
    the right edge, hollow, the published scores at full budget. Raises `UserError` without
    matplotlib."""
    tasks, methods = tasks_of(records), methods_of(records)
    num_rows = -(-len(tasks) // _COLUMNS)

    def draw(figure: Any) -> None:
        panels = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
        for axes in panels[len(tasks) :]:
            axes.set_axis_off()
        legend: dict[str, Any] = {}
        for axes, task in zip(panels, tasks, strict=False):
            for method in methods:
                chosen = [r for r in records if (r["task"], r["method"]) == (task, method)]
                _draw_method(axes, chosen, task, method)
            axes.set(title=task, xlabel="steps", ylim=(-2, 104))
            handles, labels = axes.get_legend_handles_labels()
            legend |= dict(zip(labels, handles, strict=True))
        hollow = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "color": "#555555"}
        (legend["published, at full budget"],) = panels[0].plot([], linestyle="", **hollow)
        for axes in panels[::_COLUMNS]:
            axes.set_ylabel("macro accuracy, %")
        look = {"loc": "outside lower center", "ncols": 8, "frameon": False}
        figure.legend(legend.values(), legend.keys(), **look)

    save_figure(path, draw, size=(14, 3.9 * num_rows + 0.6), dpi=110)


def _draw_method(axes: Any, records: list[Record], task: str, method: str) -> None:
    """Line and published score; nothing where no run stayed finite."""
    steps, accuracy = mean_curve(records).T
    if not len(steps):
        return
    index = MAD_METHODS.index(method)
    look = {"color": COLOURS[index], "marker": MARKERS[index]}
    axes.plot(steps, 100 * accuracy, label=METHODS[method].label, markersize=4, **look)
    if method in PUBLISHED:
        look |= {"markerfacecolor": "none", "markersize": 9, "linestyle": "", "clip_on": False}
        axes.plot([1.04 * steps[-1]], [PUBLISHED[method][task]], **look)
