"""Tables of a MAD sweep: scores and the published ones, measures of the memory, footnotes.

The score of a task is the mean over its settings of the best test accuracy (macro, by the protocol)
of a setting's learning rates and decays; with several seeds, their mean counts as one run.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from ttcd_kernels.table import format_table

from experiments.studies.mad.models import MAD_METHODS
from experiments.studies.mad.records import Record
from experiments.studies.mad.tasks.settings import PUBLISHED, TASKS, settings
from ttcd_jax.methods import METHODS

_SCORE = "macro_accuracy"
_FACTS = {"|eta S|/|W|": "memory_ratio", "beta": "gate_mean", "key rank": "key_rank"}


def best_run(record: Record) -> dict[str, Any] | None:
    """The pair of rate and decay with the highest mean accuracy as one run: `metrics`, the means
    over its seeds, and `curves`, one per seed; None where every pair has a run that failed."""
    pairs: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for run in record["runs"]:
        pairs.setdefault((run["rate"], run["weight_decay"]), []).append(run)
    complete = [
        runs[0] | {"metrics": _mean(runs), "curves": [run["curve"] for run in runs]}
        for runs in pairs.values()
        if all(run["metrics"] for run in runs)
    ]
    return max(complete, key=lambda run: run["metrics"][_SCORE], default=None)


def _mean(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each metric over the runs; empty without a run."""
    names = runs[0]["metrics"] if runs else ()
    return {name: np.mean([run["metrics"][name] for run in runs], axis=0) for name in names}


def report(records: list[Record]) -> str:
    parts = ["\nMAD: best test accuracy over the runs of a setting, mean over settings, in percent"]
    parts += [format_table(score_table(records)), *footnotes(records)]
    if table := memory_table(records):
        parts.append("\nThe memory (best run of each setting, mean over settings)")
        parts.append(format_table(table))
    return "\n".join(parts) + "\n"


def score_table(records: list[Record]) -> list[dict[str, str]]:
    """A row per method, a column per task: macro accuracy / micro accuracy (published macro
    accuracy). The mean is over the tasks that have a score."""
    rows = []
    for method in methods_of(records):
        row, scores, published = {"method": METHODS[method].label}, [], []
        for task in tasks_of(records):
            row[task] = "-"
            if metrics := _task_metrics(records, task, method):
                scores.append(100 * metrics[_SCORE])
                row[task] = f"{scores[-1]:.1f} / {100 * metrics['micro_accuracy']:.1f}"
                if method in PUBLISHED:
                    published.append(PUBLISHED[method][task])
                    row[task] += f" ({published[-1]:.1f})"
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
            metrics = _task_metrics(records, task, method)
            if not metrics or f"{_SCORE}_off" not in metrics:
                continue
            row = {"task": task, "method": METHODS[method].label}
            row["on"] = f"{100 * metrics[_SCORE]:.1f}"
            row["off"] = f"{100 * metrics[f'{_SCORE}_off']:.1f}"
            for title, name in _FACTS.items():
                row[title] = " ".join(f"{x:.3g}" for x in metrics.get(name, ())) or "-"
            rows.append(row)
    return rows


def footnotes(records: list[Record]) -> list[str]:
    runs = [run for record in records for run in record["runs"]]
    failed = sum(run["failed_at"] is not None for run in runs)
    rates, decays, seeds = (
        _values(run[name] for run in runs) for name in ("rate", "weight_decay", "seed")
    )
    done = {(record["task"], record["setting"]) for record in records}
    counts = (
        f"{task} {sum(name == task for name, _ in done)} of {len(settings(task))}"
        for task in tasks_of(records)
    )
    return [
        "cells: macro / micro accuracy on the test rows (published macro accuracy; all settings, "
        "200 epochs, 3 rates, 2 decays); means in brackets are ours, of the scores in brackets",
        f"settings: {', '.join(counts)}",
        *(f"budget of {', '.join(tasks)}: {text}" for text, tasks in _budgets(records).items()),
        f"runs: rates {rates}, decays {decays}, seeds {seeds}; {failed} of {len(runs)} not finite, "
        "without a score",
        f"schedule {_values(record['recipe']['schedule'] for record in records)}, score of the "
        "last epoch (published code: constant, of the lowest test loss, stops at accuracy 0.999)",
        f"initial standard deviation {_values(record['model']['init_std'] for record in records)} "
        "(published: 0.02)",
        f"computed in {_values(record['model']['precision']['compute'] for record in records)} on "
        f"{_values(record['environment']['device'] for record in records)}",
    ]


def _budgets(records: list[Record]) -> dict[str, list[str]]:
    """A budget -> the tasks that were trained with it."""
    tasks_with: dict[str, list[str]] = {}
    for task in tasks_of(records):
        chosen = [record for record in records if record["task"] == task]
        names = ("steps", "epochs", "num_train", "published_num_train", "num_test")
        steps, epochs, train, published, test = (_span([r[name] for r in chosen]) for name in names)
        batch = _span([r["recipe"]["batch_size"] for r in chosen])
        text = f"{steps} steps ({epochs} epochs) of {batch} rows, {train} training rows "
        text += f"(published: {published}), {test} test rows"
        tasks_with.setdefault(text, []).append(task)
    return tasks_with


def tasks_of(records: list[Record]) -> list[str]:
    return [task for task in TASKS if any(record["task"] == task for record in records)]


def methods_of(records: list[Record]) -> list[str]:
    return [name for name in MAD_METHODS if any(record["method"] == name for record in records)]


def _task_metrics(records: list[Record], task: str, method: str) -> dict[str, Any]:
    """Metrics of the best runs, mean over the settings that have one; the footnotes report how many
    runs failed."""
    chosen = [r for r in records if r["task"] == task and r["method"] == method]
    return _mean([run for run in map(best_run, chosen) if run is not None])


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _values(values: Iterable[Any]) -> str:
    """The distinct values as text, sorted."""
    return ", ".join(sorted(set(map(str, values))))
