"""The page of several runs: a row per run, then a section for everything that was measured."""

import importlib
import itertools
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ttcd_jax.errors import UserError
from ttcd_jax.files import read_json
from ttcd_jax.measure.page import Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run, plot_lines
from ttcd_jax.measure.results import damage_named, read_all_results, task_sections
from ttcd_jax.methods import method_named
from ttcd_jax.run.directory import METRICS, RunDirectory, model_config
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.tasks import find_task
from ttcd_jax.train.state import num_params


class Run(NamedTuple):
    """A run of the page: its name there, and its metrics."""

    label: str
    path: Path
    metrics: list[dict[str, Any]]


def write_report(
    run_dirs: Sequence[Path], output: Path, next_steps: Sequence[str]
) -> list[Section]:
    """Writes `index.html` and its pictures into `output`; returns the sections of the page. Raises
    `UserError` for a folder of which nothing was measured, `DataError` for damaged results."""
    sweeps = [path for path in run_dirs if (path / "records").is_dir()]
    others = [path for path in run_dirs if path not in sweeps]
    for path in others:
        RunDirectory(path).check_imports()
    if find_spec("experiments.studies") is not None:
        importlib.import_module("experiments.studies.equivalence.tasks")  # they are registered
    results = read_all_results(others)
    for result in itertools.chain(*results.values()):
        find_task(str(result.get("task")))  # an unknown one would be left out
    runs = [Run(*x, read_metrics(x[1] / METRICS)) for x in zip(results, others, strict=True)]
    for run in runs:
        if not (results[run.label] or run.metrics):
            raise UserError(
                f"nothing was measured in {run.path}: train it, or run experiments.evaluate first"
            )
    with coloured_by_run([run.label for run in runs]) as colours:
        sections = [
            *task_sections(results, output),
            *_sweeps(sweeps, output),
            *_training(runs, output),
        ]
    options = {"colours": colours, "sections": sections, "next_steps": next_steps}
    facts = [_facts(run) for run in runs]
    write_page(output / "index.html", title="ttcd_jax report", runs=facts, **options)
    return sections


def _facts(run: Run) -> dict[str, Any]:
    """The row of a run in the first table of the page."""
    directory = RunDirectory(run.path)
    config, model = directory.read_config(), model_config(directory)
    return {
        "run": run.label,
        "method": method_named(model.method).label,
        "parameters": num_params(model),
        "steps": max((record["step"] for record in run.metrics), default=config.get("steps")),
        "tokens per row": config.get("data", {}).get("seq_len"),
        "device": _devices(run),
        "directory": str(run.path),
    }


def _devices(run: Run) -> str:
    path = run.path / "environment.json"
    devices = read_json(path).get("devices") if path.exists() else None
    return ", ".join(sorted({*map(str, devices)})) if isinstance(devices, list) else ""


def _training(runs: Sequence[Run], output: Path) -> list[Section]:
    """The curve of the loss and the speed of every run that was trained here."""
    lines, table = {}, []
    for run in runs:
        losses = _numbers(run, "loss")
        speeds = [x for x in _numbers(run, "tokens_per_second").values() if x]
        if not losses:
            continue
        lines[run.label] = [*losses], [*losses.values()]
        last = {"step": max(losses), "training loss (nats per token)": losses[max(losses)]}
        speed = statistics.median(speeds) if speeds else None
        table.append({"run": run.label} | last | {"tokens/s (median)": speed})
    if not table:
        return []
    path = output / "training.png"
    plot_lines(path, title="Training loss", x_label="step", y_label="nats per token", series=lines)
    sentence = "The loss of the training batches by step; lower is better."
    return [Section("Training and its speed", table, [Picture(Path(path.name), sentence)])]


def _numbers(run: Run, name: str) -> dict[int, float]:
    """The values of a metric by step, where it is a number."""
    found = {record["step"]: record.get(name) for record in run.metrics}
    return {n: x for n, x in found.items() if isinstance(x, int | float) and abs(x) < 1e300}


def _sweeps(sweeps: Sequence[Path], output: Path) -> list[Section]:
    if not sweeps:
        return []
    if find_spec("experiments.studies") is None:
        raise UserError(f"{sweeps[0]} is a MAD sweep: only a checkout shows it, not the wheel")
    from experiments.studies.mad.picture import draw_curves
    from experiments.studies.mad.records import gather
    from experiments.studies.mad.report import footnotes, score_table

    records, path = gather(sweeps), output / "mad.png"
    sentence = "Test accuracy of six synthetic tasks by step; hollow: published, at full budget. "
    with damage_named(f"a record of {', '.join(map(str, sweeps))}"):
        draw_curves(path, records)
        picture = Picture(Path(path.name), sentence + ". ".join(footnotes(records)) + ".")
        return [Section("MAD: synthetic tasks", score_table(records), [picture])]
