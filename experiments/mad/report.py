"""Tables of a MAD sweep: scores beside the published ones, what the memory holds, footnotes.

The score of a task is the mean over its settings of the best test accuracy (macro, by the protocol)
of a setting's learning rates and decays; over several seeds their mean counts as one run.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from experiments.mad.models import MAD_METHODS
from experiments.mad.tasks.settings import TASKS, settings
from ttcd_jax.methods import METHODS

Record = dict[str, Any]

# The published table, in percent, in the order of TASKS: best of 3 rates and 2 decays for each of
# the 66 settings. Its "overall" is not the mean of the six for the first three rows.
PUBLISHED: dict[str, dict[str, float]] = {
    method: dict(zip(TASKS, values, strict=True))
    for method, values in {
        "deltanet": (99.9, 86.7, 25.1, 55.5, 42.3, 100.0),
        "gated_deltanet": (99.9, 99.7, 18.2, 86.9, 47.3, 99.9),
        "lact": (100.0, 100.0, 18.6, 80.7, 48.3, 99.8),
        "ipttt": (98.1, 97.1, 52.4, 82.9, 43.4, 96.6),
        "ipttcd": (99.3, 98.8, 56.2, 88.9, 50.0, 99.2),
    }.items()
}
_SCORE = "macro_accuracy"


def best_run(record: Record) -> dict[str, Any] | None:
    """The pair of rate and decay with the highest mean accuracy over the seeds, as one run whose
    metrics are the means; None where every pair has a run that failed."""
    groups: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for run in record["runs"]:
        groups.setdefault((run["rate"], run["weight_decay"]), []).append(run)
    whole = [_mean_run(runs) for runs in groups.values() if all(run["metrics"] for run in runs)]
    return max(whole, key=lambda run: run["metrics"][_SCORE], default=None)


def _mean_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = runs[0]["metrics"]
    means = {
        name: np.mean([run["metrics"][name] for run in runs], axis=0).tolist() for name in names
    }
    return runs[0] | {"metrics": means}


def best_curve(record: Record) -> np.ndarray | None:
    """[evaluations, 2]: step and macro accuracy of the best pair of rate and decay, mean over
    the seeds; None where every pair failed."""
    best = best_run(record)
    if best is None:
        return None
    pair = best["rate"], best["weight_decay"]
    steps_per_epoch = record["steps"] / record["epochs"]
    return mean_curve(
        [
            np.array([(p["epoch"] * steps_per_epoch, p["macro_accuracy"]) for p in run["curve"]])
            for run in record["runs"]
            if (run["rate"], run["weight_decay"]) == pair
        ]
    )


def mean_curve(curves: list[np.ndarray]) -> np.ndarray:
    """Over what all curves have: one that ended early (an option) ends them all."""
    shortest = min(map(len, curves))
    return np.mean([curve[:shortest] for curve in curves], axis=0)


def score_table(records: list[Record]) -> list[dict[str, str]]:
    """A row per method, a column per task: macro accuracy, micro accuracy behind a slash, the
    published macro accuracy in brackets. The mean is that of the tasks that are there."""
    rows = []
    for method in methods_of(records):
        row, scores, published = {"method": METHODS[method].label}, [], []
        for task in tasks_of(records):
            metrics = _mean_metrics(records, task, method)
            cell = "-"
            if metrics:
                scores.append(100 * metrics[_SCORE])
                cell = f"{scores[-1]:.1f} / {100 * metrics['micro_accuracy']:.1f}"
                if method in PUBLISHED:
                    published.append(PUBLISHED[method][task])
                    cell += f" ({published[-1]:.1f})"
            row[task] = cell
        row["mean"] = f"{np.mean(scores):.1f}" if scores else "-"
        if published:
            row["mean"] += f" ({np.mean(published):.1f})"
        rows.append(row)
    return rows


def memory_table(records: list[Record]) -> list[dict[str, str]]:
    """A row per task and method with a memory that can be switched off: accuracy with it on and
    off (macro, percent), and by layer |eta S| / |W_base|, beta, and the keys' effective rank."""
    rows = []
    for task in tasks_of(records):
        for method in methods_of(records):
            metrics = _mean_metrics(records, task, method)
            if not metrics or f"{_SCORE}_off" not in metrics:
                continue
            row = {"task": task, "method": METHODS[method].label}
            row["on"] = f"{100 * metrics[_SCORE]:.1f}"
            row["off"] = f"{100 * metrics[f'{_SCORE}_off']:.1f}"
            for title, name in (
                ("|eta S|/|W|", "memory_ratio"),
                ("beta", "gate_mean"),
                ("key rank", "key_rank"),
            ):
                values = metrics.get(name)
                row[title] = "-" if values is None else " ".join(f"{x:.3g}" for x in values)
            rows.append(row)
    return rows


def footnotes(records: list[Record]) -> list[str]:
    """What the numbers are and are not: budget, sweep, options, device, runs that failed."""
    recipes = [record["recipe"] for record in records]
    runs = [run for record in records for run in record["runs"]]
    failed = sum(run["failed_at"] is not None for run in runs)
    done = {task: len({r["setting"] for r in records if r["task"] == task}) for task in TASKS}
    counts = ", ".join(
        f"{task} {count} of {len(settings(task))}" for task, count in done.items() if count
    )
    return [
        "cells: macro / micro accuracy on the test rows (published macro accuracy; all settings, "
        "200 epochs, 3 rates, 2 decays)",
        f"settings: {counts}",
        *(f"budget of {', '.join(tasks)}: {text}" for text, tasks in _budgets(records).items()),
        f"runs: rates {_values(run['rate'] for run in runs)}, decays "
        f"{_values(run['weight_decay'] for run in runs)}, seeds "
        f"{_values(run['seed'] for run in runs)}; {failed} of {len(runs)} not finite, without a "
        "score",
        f"options: schedule {_values(r['schedule'] for r in recipes)}, score of "
        f"{_values(r['selects'] for r in recipes)}, stops at test accuracy "
        f"{_values(r['stops_at'] for r in recipes)}; published code: constant, best_test_loss, "
        "0.999",
        f"initial standard deviation {_values(r['model']['init_std'] for r in records)} "
        "(published: 0.02)",
        f"computed in {_values(r['model']['precision']['compute'] for r in records)} on "
        f"{_values(r['environment']['device'] for r in records)}",
    ]


def _budgets(records: list[Record]) -> dict[str, list[str]]:
    """What was spent on a task -> the tasks it was spent on."""
    found: dict[str, list[str]] = {}
    for task in tasks_of(records):
        chosen = [record for record in records if record["task"] == task]
        text = (
            f"{_span(r['steps'] for r in chosen)} steps ({_span(r['epochs'] for r in chosen)} "
            f"epochs) of {_span(r['recipe']['batch_size'] for r in chosen)} rows, "
            f"{_span(r['num_train'] for r in chosen)} training rows (published: "
            f"{_span(r['published_num_train'] for r in chosen)}), "
            f"{_span(r['num_test'] for r in chosen)} test rows"
        )
        found.setdefault(text, []).append(task)
    return found


def tasks_of(records: list[Record]) -> list[str]:
    return [task for task in TASKS if any(record["task"] == task for record in records)]


def methods_of(records: list[Record]) -> list[str]:
    return [name for name in MAD_METHODS if any(record["method"] == name for record in records)]


def _mean_metrics(records: list[Record], task: str, method: str) -> dict[str, Any]:
    """Metrics of the best runs, mean over the settings that have one; the footnotes tell how many
    runs failed."""
    chosen = [r for r in records if r["task"] == task and r["method"] == method]
    best = [run["metrics"] for run in map(best_run, chosen) if run is not None]
    if not best:
        return {}
    return {name: np.mean([metrics[name] for metrics in best], axis=0) for name in best[0]}


def _span(values: Iterable[int]) -> str:
    found = {*values}
    low, high = min(found), max(found)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _values(values: Iterable[Any]) -> str:
    found = sorted({str(value) for value in values})
    return ", ".join(found)
