"""The page of several runs: a row per run, then a section for everything that was measured."""

import importlib
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ttcd_kernels.table import Row

from ttcd_jax.commands.cli import CONFIG_DIR
from ttcd_jax.data.sources import row_length
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json
from ttcd_jax.measure.page import Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run, plot_lines
from ttcd_jax.measure.results import read_all_results, task_sections
from ttcd_jax.run.directory import METRICS, RunDirectory, model_config
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.state import num_params

_CURVES = {  # of a metric: title, name of the axis
    "loss": ("Training and its speed", "training loss (nats per token)"),
    "memory_ratio": ("Size of the memory, mean over layers", "|eta S| / |W_base|"),
    "gate_mean": ("Gate of the memory, mean over layers", "mean of beta"),
    "window_share": ("Share of the windows in what is written, mean over layers", "share of |e|^2"),
}
_LAST = {"memory_ratio": "|eta S|/|W|", "gate_mean": "gate", "window_share": "window share"}


class Run(NamedTuple):
    """A run of a page: its name there, and its metrics."""

    label: str
    path: Path
    metrics: list[dict[str, Any]]

    @classmethod
    def read(cls, label: str, path: Path) -> "Run":
        return cls(label, path, read_metrics(path / METRICS))

    def numbers(self, name: str) -> dict[int, float]:
        """The values of a metric by step, the mean over layers, where they are numbers."""
        found = {}
        for record in self.metrics:
            values = [x for key, x in record.items() if key.partition("/")[0] == name]
            if values and all(isinstance(x, int | float) and abs(x) < 1e300 for x in values):
                found[record["step"]] = statistics.fmean(values)
        return found

    def last(self, name: str) -> str | None:
        """The medians of the last ten values of a metric, by layer."""
        layers: dict[str, list[float]] = {}
        for key, x in (item for record in self.metrics for item in record.items()):
            if key.partition("/")[0] == name and isinstance(x, float):
                layers.setdefault(key, []).append(x)
        return ", ".join(f"{statistics.median(x[-10:]):.2g}" for x in layers.values()) or None


def write_report(
    run_dirs: Sequence[Path], output: Path, next_steps: Sequence[str], between: Sequence[str] = ()
) -> list[Section]:
    """Writes `index.html` and its pictures into `output`; returns the sections of the page. Raises
    `UserError` for a folder of which nothing was measured, and where no task has results `between`
    two columns; `DataError` for damaged results."""
    files = [path for path in run_dirs if path.is_file()]
    sweeps = [path for path in run_dirs if (path / "records").is_dir()]
    others = [path for path in run_dirs if path not in (*files, *sweeps)]
    for path in others:
        RunDirectory(path).check_imports()
    if _has_studies():
        importlib.import_module("experiments.studies.equivalence.tasks")  # they are registered
    elif sweeps:
        raise UserError(f"{sweeps[0]} is a MAD sweep: only a checkout shows it, not the wheel")
    results = read_all_results(others)
    runs = [Run.read(*x) for x in zip(results, others, strict=True)]
    for run in runs:
        if not (results[run.label] or run.metrics):
            raise UserError(
                f"nothing was measured in {run.path}: train it, or run ttcd evaluate first"
            )
    with coloured_by_run([run.label for run in runs]) as colours:
        sections = [
            *task_sections(results, output, between),
            *(_sweep(path, output / f"mad_{i}.png") for i, path in enumerate(sweeps)),
            *training_sections(runs, output),
            *(section for path in files for section in _tables(path)),
        ]
    options = {"colours": colours, "sections": sections, "next_steps": next_steps}
    write_page(output / "index.html", title="ttcd_jax report", runs=run_rows(runs), **options)
    return sections


def run_rows(runs: Sequence[Run]) -> list[Row]:
    """The first table of a page."""
    rows = []
    for run in runs:
        directory = RunDirectory(run.path)
        config, model = directory.read_config(), model_config(directory)
        environment = run.path / "environment.json"
        devices = read_json(environment).get("devices") if environment.exists() else None
        devices = sorted({*map(str, devices)}) if isinstance(devices, list) else []
        steps = max((x["step"] for x in run.metrics), default=config.get("steps"))
        length, size = row_length(directory.read_part("data")), config.get("batch_size")
        per_token = training_flops_per_token(model, length)
        row = {
            "run": run.label,
            "method": model.label,
            "parameters": num_params(model),
            "steps": steps,
            "tokens per row": length,
            "FLOPs per token": float(per_token),
            "training FLOPs": float(per_token * length * size * steps) if size and steps else None,
            "device": ", ".join(devices),
            "directory": str(run.path),
        }
        last = {column: run.last(name) for name, column in _LAST.items()}
        rows.append(row | {column: text for column, text in last.items() if text})
    return rows


def training_sections(runs: Sequence[Run], output: Path) -> list[Section]:
    """Loss and speed of the runs that were trained here, and how far their memory moves the
    weights: a curve by step, and the last value."""
    sections = []
    for name, (title, y_label) in _CURVES.items():
        table, lines = [], {}
        for run in runs:
            if found := run.numbers(name):
                lines[run.label] = [*found], [*found.values()]
                row = {"run": run.label, "step": max(found), y_label: found[max(found)]}
                if name == "loss":
                    speeds = [x for x in run.numbers("tokens_per_second").values() if x]
                    row["tokens/s (median)"] = statistics.median(speeds) if speeds else None
                table.append(row)
        if table:
            path = output / ("training.png" if name == "loss" else f"{name}.png")
            plot_lines(path, title=title, x_label="step", y_label=y_label, series=lines)
            sections.append(Section(title, table, [Picture(path.absolute(), f"{title}, by step.")]))
    return sections


def _has_studies() -> bool:
    """Whether `experiments` is the folder of our checkout, and not somebody else's."""
    found = find_spec("experiments")
    folder = Path(found.origin or "").resolve().parent if found else None
    return folder == CONFIG_DIR.resolve().parent and find_spec("experiments.studies") is not None


def _sweep(path: Path, picture: Path) -> Section:
    from experiments.studies.mad.records import sweep_section

    return sweep_section(path, picture)


def _tables(path: Path) -> list[Section]:
    """The tables in a file that a benchmark, a check of kernels or `experiments.proposition` has
    written, each with its device and commit. Raises `DataError` for a file without any."""
    report = read_json(path)
    where, ops = report.get("environment"), report.get("ops")
    parts = {"": report} | (ops if isinstance(ops, dict) else {})
    found = {
        " ".join(filter(None, (path.stem, name, kind))): rows
        for name, part in parts.items()
        for kind in ("parity", "rows")
        if isinstance(part, dict) and isinstance(rows := part.get(kind), list) and rows
    }
    rows = [row for table in found.values() for row in table]
    if not rows or not all(isinstance(row, dict) for row in (*rows, where)):
        raise DataError(f"{path} is no report of a benchmark: it has no rows and environment")
    suffix = f"({where.get('device')}, {where.get('commit')})"
    return [Section(f"{title} {suffix}", rows) for title, rows in found.items()]
