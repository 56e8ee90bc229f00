"""What a sweep records, a JSON file per finished setting and method, complete or absent, and the
scores beside the published ones: tables, footnotes, the pictures of learning.

The score of a task is the mean over its settings of the best test accuracy (macro, by the protocol)
of a setting's learning rates and decays; with several seeds, their mean counts as one run.
"""

import contextlib
import dataclasses
import itertools
import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from ttcd_kernels.table import Row, format_table

from experiments.studies.mad.tasks import PUBLISHED, TASKS, MADConfig, TaskName, settings
from ttcd_jax.config import Bound, Config, NonNegative, NonNegativeFloat, Positive
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json, write_whole
from ttcd_jax.measure.page import Section
from ttcd_jax.measure.pictures import Picture, plot_lines
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.run import page
from ttcd_jax.storage import lock

# The methods with published scores, the delta rule, both with equal windows (no gap), and those
# without a memory: SWA is IP-TTCD with eta 0.
MAD_METHODS = (
    *PUBLISHED,
    *("ipttcd_no_gap", "ipttcd_delta", "ipttcd_delta_no_gap", "swa", "full"),
)
MADMethod = Annotated[str, Bound(f"one of {', '.join(MAD_METHODS)}", MAD_METHODS.__contains__)]
Layers = tuple[float, float] | None  # a number of each fast layer
_BY_LAYER = {
    "|eta S|/|W|": "memory_ratio",
    "beta": "gate_mean",
    "window share": "window_share",
}


class RecipeConfig(Config):
    """AdamW (beta 0.9 and 0.999, eps 1e-8) without a clip or warm-up, decay on every tensor, the
    rate constant within an epoch: 1e-6 + (rate - 1e-6) (1 + cos(pi epoch / epochs)) / 2; the
    fewest epochs with `max_steps`. The published code differs, mostly by accident: its cosine is
    never applied (`schedule="constant"`), its score is that of the epoch with the lowest loss on
    the *test* rows, not of the last one, and a run ends at a test accuracy above 0.999."""

    epochs: Positive = 200
    max_steps: Positive | None = None
    batch_size: Positive = 128
    schedule: Literal["cosine", "constant"] = "cosine"

    def steps_per_epoch(self, num_train: int) -> int:
        """The number of batches of an epoch, the last of which may be partial."""
        return -(-num_train // self.batch_size)

    def num_epochs(self, num_train: int) -> int:
        if self.max_steps is None:
            return self.epochs
        return min(self.epochs, -(-self.max_steps // self.steps_per_epoch(num_train)))


class Recorded(Config):
    """A part of a record: JSON has its fields, not its class; no optional one that is absent."""

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        return {x.name: y for x in dataclasses.fields(self) if (y := found[x.name]) != x.default}


class Measures(Recorded):
    """The scores of MAD on the test rows, the same with the memory switched off (`*_off`), of each
    fast layer those of `MemoryStats`. What is not finite, or does not exist, is None, and not in
    the file."""

    gate_mean: Layers = None
    loss: float | None = None
    loss_off: float | None = None
    macro_accuracy: float
    macro_accuracy_off: float | None = None
    memory_ratio: Layers = None
    micro_accuracy: float
    micro_accuracy_off: float | None = None
    window_share: Layers = None


class Point(Recorded):
    """An evaluation of a run; a loss is None where it is not finite: JSON has no NaN."""

    epoch: Positive
    macro_accuracy: float
    loss: float | None
    training_loss: float | None


class Run(Recorded):
    """A run: `failed_at`, the first step that was not finite, or None; `metrics` after the last
    epoch, None if it failed; `curve`, every evaluation up to the failure."""

    rate: NonNegativeFloat
    weight_decay: NonNegativeFloat
    seed: NonNegative
    failed_at: NonNegative | None
    metrics: Measures | None
    curve: tuple[Point, ...]


class Job(Recorded):
    """A setting and a method: its runs are trained together and recorded in one file."""

    task: TaskName
    setting: str
    method: MADMethod
    data: MADConfig
    num_train: Positive
    num_test: Positive
    published_num_train: Positive
    epochs: Positive
    steps: Positive
    recipe: RecipeConfig
    model: TransformerConfig

    @property
    def name(self) -> str:
        return f"{self.task}.{self.setting}.{self.method}"


class Record(Job):
    """A finished job: where and in how many seconds it was computed, and its runs."""

    environment: Annotated[dict, Bound("the facts of a device", lambda x: "device" in x)]
    seconds: float
    runs: tuple[Run, ...]


def record_path(sweep: Path, job: Job) -> Path:
    return sweep / "records" / f"{job.name}.json"


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether this process does the job of record `path`: it is not recorded yet, and no other
    process of this machine has claimed it. The claim ends with the block, or with the process."""
    locks = path.parent / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / path.stem).open("w") as handle:
        try:
            lock(handle)
            is_ours = not path.exists()
        except BlockingIOError:
            is_ours = False
        yield is_ours


def write(path: Path, record: Record) -> None:
    """Writes the record atomically; it is on disk when this returns."""
    write_whole(path, json.dumps(record.to_dict(), indent=1, allow_nan=False) + "\n")


def read(path: Path) -> Record:
    """The record in a file. Raises `DataError` for a damaged one."""
    try:
        return Record.from_dict(read_json(path))
    except UserError as error:
        text = f"{path} is damaged ({error}): delete the file and run the sweep again"
        raise DataError(text) from error


def gather(sweeps: Sequence[Path], own: Sequence[Path] = ()) -> list[Record]:
    """The records of sweeps. Raises `UserError` for a folder without any and for a job of two, or
    of one and of the paths `own`, `DataError` where one is damaged."""
    found, paths = {x.name: x for x in own}, list[Path]()
    for sweep in sweeps:
        if not (sweep / "records").is_dir():
            raise UserError(f"{sweep} holds no records: give the folder of a sweep")
        for path in sorted((sweep / "records").glob("*.json")):
            if (other := found.setdefault(path.name, path)) != path:
                text = "have the same job: give folders of other tasks or methods"
                raise UserError(f"{other} and {path} {text}")
            paths.append(path)
    return [*map(read, paths)]


class Score(NamedTuple):
    """The mean of each measure of some runs, and of their curves [evaluations, 2], step and macro
    accuracy, up to the end of the shortest; empty for no run."""

    means: dict[str, Any]
    curve: np.ndarray


def mean(found: Sequence[Score]) -> Score:
    """The mean of every measure that all have, and of the curves."""
    if not found:
        return Score({}, np.empty((0, 2)))
    names = [name for name in found[0].means if all(name in x.means for x in found)]
    length = min(len(x.curve) for x in found)
    means = {name: np.mean([x.means[name] for x in found], axis=0) for name in names}
    return Score(means, np.mean([x.curve[:length] for x in found], axis=0))


def best_run(record: Record) -> Score | None:
    """The pair of rate and decay with the highest mean accuracy over its seeds; None where every
    pair has a run that failed."""
    pairs: dict[Any, list[Any]] = {}
    for run in record.runs:
        pair = {"rate": run.rate, "weight_decay": run.weight_decay}
        curve = [(x.epoch * record.steps / record.epochs, x.macro_accuracy) for x in run.curve]
        score = run.metrics and Score(run.metrics.to_dict() | pair, np.reshape(curve, (-1, 2)))
        pairs.setdefault((*pair.values(),), []).append(score)
    complete = [mean(found) for found in pairs.values() if all(found)]
    return max(complete, key=lambda x: x.means["macro_accuracy"], default=None)


def best_text(record: Record) -> str:
    if (best := best_run(record)) is None:
        return "no run stayed finite"
    text = "accuracy {macro_accuracy:.3f} at rate {rate:g}, decay {weight_decay:g}"
    return text.format(**best.means)


def scores(records: Sequence[Record]) -> dict[tuple[str, str], Score]:
    """By task and method, the mean of the best runs over the settings that have one: the footnotes
    report how many runs failed."""
    pairs = itertools.product(TASKS, MAD_METHODS)
    found = {pair: [x for x in records if (x.task, x.method) == pair] for pair in pairs}
    return {pair: mean([*filter(None, map(best_run, x))]) for pair, x in found.items() if x}


def sweep_section(sweep: Path, picture: Path) -> Section:
    """The scores of a sweep and their pictures, which are drawn."""
    records = gather([sweep])
    options = {"pictures": draw_curves(picture, records), "lines": footnotes(records)}
    return Section(f"MAD: synthetic tasks ({sweep.name})", score_table(records), **options)


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
    rows, names = [], [*dict.fromkeys(task for task, _ in scores(records)), "mean"]
    for method, label, means in _by_method(records):
        rows.append(row := {"method": label} | dict.fromkeys(names, "-"))
        accuracies = ("macro_accuracy", "micro_accuracy")
        own = {task: [100 * x[name] for name in accuracies] for task, x in means.items()}
        for task, (macro, micro) in own.items():
            row[task] = f"{macro:.1f} / {micro:.1f}"
            row["mean"] = f"{np.mean([*own.values()], axis=0)[0]:.1f}"
        for task, score in _published(method, means).items():
            row[task] += f" ({score:.1f})"
    return rows


def memory_table(records: Sequence[Record]) -> list[Row]:
    """A row per task and method with a memory that can be switched off: accuracy with it on and
    off (macro, percent), and by layer |eta S| / |W_base|, beta, and the share of the windows in
    what is written."""
    rows, labels = [], _labels(records)
    for (task, method), (means, _) in scores(records).items():
        if "macro_accuracy_off" in means:
            row = {"task": task, "method": labels[method]}
            for title, name in (("on", "macro_accuracy"), ("off", "macro_accuracy_off")):
                row[title] = f"{100 * means[name]:.1f}"
            for title, name in _BY_LAYER.items():
                row[title] = " ".join(f"{x:.3g}" for x in means.get(name, ())) or "-"
            rows.append(row)
    return rows


def write_records(file: str, records: Sequence[Record], command: str) -> None:
    """Writes a line of JSON with what holds for all others, then by method a line with macro
    accuracy in percent, [ours, published]; one with the memory off; and one with all measures."""
    on, off, details = [], [], []
    for method, label, means in _by_method(records):
        own = {x: [_percent(y["macro_accuracy"])] for x, y in means.items()}
        own["mean"] = [round(float(np.mean([x for [x] in own.values()])), 1)]
        for task, score in _published(method, means).items():
            own[task].append(round(score, 1))
        on.append({"method": label} | own)
        held = {x: y for x, y in means.items() if "macro_accuracy_off" in y}
        if without := {x: _percent(y["macro_accuracy_off"]) for x, y in held.items()}:
            off.append({"method": f"{label}, off at evaluation"} | without)
        rounded = {x: {z: np.round(n, 4).tolist() for z, n in y.items()} for x, y in means.items()}
        details.append({"method": label} | rounded)
    titles = "macro accuracy, %", "macro accuracy with the memory off, %", "all measures, by task"
    sections = [Section(*x) for x in zip(titles, (on, off, details), strict=True)]
    commits = ", ".join(sorted({str(x.environment["commit"]) for x in records}))
    seeds = sorted({run.seed for x in records for run in x.runs})
    budget = footnotes(records)
    page.write_records(file, sections, [], command, commit=commits, seeds=seeds, budget=budget)


def _by_method(records: Sequence[Record]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, its label, by task the means that it has) of every method with a record."""
    found, labels = scores(records), _labels(records)
    for method in (x for x in MAD_METHODS if any(x in pair for pair in found)):
        means = {task: x.means for (task, y), x in found.items() if y == method and x.means}
        yield method, labels[method], means


def _published(method: str, tasks: Iterable[str]) -> dict[str, float]:
    """The published scores of these tasks and their mean; none of another method, or of no task."""
    own = {task: PUBLISHED[method][task] for task in tasks if method in PUBLISHED}
    return own | {"mean": float(np.mean([*own.values()]))} if own else {}


def _percent(share: float) -> float:
    return round(100 * float(share), 1)


def footnotes(records: Sequence[Record]) -> list[str]:
    """The protocol, the budget and the options of the tables."""
    runs, counts, budgets = [run for record in records for run in record.runs], [], {}
    for task in TASKS:
        if chosen := [x for x in records if x.task == task]:
            counts.append(f"{task} {len({x.setting for x in chosen})} of {len(settings(task))}")
            text = (
                f"{_span(chosen, 'steps')} steps ({_span(chosen, 'epochs')} epochs) of "
                f"{_span(chosen, 'recipe.batch_size')} rows, {_span(chosen, 'num_train')} training "
                f"rows (published: {_span(chosen, 'published_num_train')}), "
                f"{_span(chosen, 'num_test')} test rows"
            )
            budgets.setdefault(text, []).append(task)
    devices = ", ".join(sorted({str(x.environment["device"]) for x in records}))
    return [
        "cells: macro / micro accuracy on the test rows (published macro accuracy; all settings, "
        "200 epochs, 3 rates, 2 decays); means in brackets are ours, of the scores in brackets",
        f"settings: {', '.join(counts)}",
        *(f"budget of {', '.join(tasks)}: {text}" for text, tasks in budgets.items()),
        f"runs: rates {_values(runs, 'rate')}, decays {_values(runs, 'weight_decay')}, seeds "
        f"{_values(runs, 'seed')}; {sum(x.failed_at is not None for x in runs)} of {len(runs)} not "
        "finite, without a score",
        f"schedule {_values(records, 'recipe.schedule')}, score of the last epoch "
        "(published code: constant, of the lowest test loss, stops at accuracy 0.999)",
        f"initial standard deviation {_values(records, 'model.init_std')} (published: 0.02)",
        f"computed in {_values(records, 'model.precision.compute')} on {devices}",
    ]


def _labels(records: Sequence[Record]) -> dict[str, str]:
    return {x.method: x.model.label for x in records}


def _span(found: Sequence[Any], name: str) -> str:
    values = [*map(operator.attrgetter(name), found)]
    return " to ".join(f"{x:,}" for x in dict.fromkeys((min(values), max(values))))


def _values(found: Sequence[Any], name: str) -> str:
    """The distinct values as text, sorted."""
    return ", ".join(sorted({str(operator.attrgetter(name)(x)) for x in found}))


def draw_curves(path: Path, records: Sequence[Record]) -> list[Picture]:
    """A picture per task, beside `path`: macro accuracy on the test rows, a line per method."""
    found, labels, pictures = scores(records), _labels(records), []
    facts = {"is_log": False, "x_label": "steps", "y_label": "macro accuracy, %"}
    for task in dict.fromkeys(task for task, _ in found):
        curves = {labels[x]: curve.T for (name, x), (_, curve) in found.items() if name == task}
        picture = Picture(Path(f"{path.stem}.{task}.svg"), f"{task}: test accuracy by step.")
        series = {name: (steps.astype(int), 100 * y) for name, (steps, y) in curves.items()}
        plot_lines(path.parent / picture.path, series=series, title=task, **facts)
        pictures.append(picture)
    return pictures
