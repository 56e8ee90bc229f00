"""The page of several runs: what it answers, a row per run, then a section for everything that was
measured. Training writes that of its own run at every evaluation."""

import contextlib
import json
import math
import shlex
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ttcd_kernels.table import Row, cells

from ttcd_jax import units
from ttcd_jax.data.sources import row_length
from ttcd_jax.errors import UserError
from ttcd_jax.files import read_json
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.measure.answers import Facts, answers, controls
from ttcd_jax.measure.page import Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run, plot_lines
from ttcd_jax.measure.results import Results, measured, task_sections
from ttcd_jax.measure.task import table_of
from ttcd_jax.methods import method_named
from ttcd_jax.models.config import TransformerConfig, switched_off
from ttcd_jax.run.config import by_path
from ttcd_jax.run.directory import METRICS, RunDirectory, model_config
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.run.trackers import Tracker
from ttcd_jax.sharding import rules
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.state import num_params

_CURVES = {  # of a metric: title, name of the axis
    "loss": ("Training and its speed", "training loss (nats per token)"),
    "memory_ratio": ("Size of the memory, mean over layers", "|eta S| / |W_base|"),
    "gate_mean": ("Gate of the memory, mean over layers", "mean of beta"),
    "window_share": ("Share of the windows in what is written, mean over layers", "share of |e|^2"),
}
COLUMNS = ("run", "method", "parameters", "steps", "tokens per row", "FLOPs per token", "tokens/s")
COLUMNS += ("held per text",)
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

    @property
    def speed(self) -> float | None:
        """The median of tokens per second."""
        speeds = [x for x in self.numbers("tokens_per_second").values() if x]
        return statistics.median(speeds) if speeds else None

    def last(self, name: str) -> str | None:
        """The medians of the last ten values of a metric, by layer."""
        layers: dict[str, list[float]] = {}
        for key, x in (item for record in self.metrics for item in record.items()):
            if key.partition("/")[0] == name and isinstance(x, float):
                layers.setdefault(key, []).append(x)
        return ", ".join(f"{statistics.median(x[-10:]):.2g}" for x in layers.values()) or None


def run_rows(runs: Sequence[Run]) -> list[Row]:
    """The first table of a page."""
    rows = []
    for run in runs:
        directory = RunDirectory(run.path)
        config, model = directory.read_config(), model_config(directory)
        steps = max((x["step"] for x in run.metrics), default=config.get("steps"))
        length, size = row_length(directory.read_part("data")), config.get("batch_size")
        per_token = training_flops_per_token(model, length)
        held = _held(model, length)
        row = {
            "run": run.label,
            "method": model.label,
            "parameters": num_params(model),
            "steps": steps,
            "tokens per row": length,
            "FLOPs per token": float(per_token),
            "training FLOPs": float(per_token * length * size * steps) if size and steps else None,
            "tokens/s": run.speed,
            "held per text": None if held is None else units.size(held),
            "device": ", ".join(_environment(run.path)["devices"]),
        }
        last = {column: run.last(name) for name, column in _LAST.items()}
        rows.append(row | {column: text for column, text in last.items() if text})
    return rows


def first_columns(rows: Sequence[Row]) -> list[Row]:
    """The columns that are not for the settings."""
    return [{name: row[name] for name in COLUMNS} for row in rows]


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
                    row["tokens/s (median)"] = run.speed
                table.append(row)
        if table:
            path = output / ("training.svg" if name == "loss" else f"{name}.svg")
            plot_lines(path, title=title, x_label="step", y_label=y_label, series=lines)
            picture = Picture(path.absolute(), f"{title}, by step.")
            sections.append(Section(title, table, [picture], is_detail=True))
    return sections


def settings_section(runs: Sequence[Run], rows: Sequence[Row]) -> Section:
    """What made every run, a column each, and the rest of its row: commit, seed and windows, the
    fields in which the runs differ; above it the commands, and the changes since."""
    columns, lines, fields = {}, [], [by_path(RunDirectory(x.path).read_config()) for x in runs]
    names: dict[str, None] = dict.fromkeys(("seed", "model.window", "model.student_window"))
    for name in dict.fromkeys(name for found in fields for name in found):
        if len({str(found.get(name)) for found in fields}) > 1:
            names[name] = None
    for run, row, found in zip(runs, rows, fields, strict=True):
        environment, config = _environment(run.path), read_json(run.path / "config.json")
        rest = {x: cells([{x: y}])[1][0][0] for x, y in row.items() if x not in COLUMNS}
        own = {name: str(found[name][1]) for name in names if name in found}
        columns[run.label] = {"commit": str(environment.get("commit"))[:12]} | own | rest
        changes = [f"{x['field']} = {x['new']}" for x in config.get("changes") or ()]
        text = f"`{_command(environment.get('command') or ['unknown'])}`"
        text += f", since then {', '.join(changes)}" if changes else ""
        lines.append(f"{run.label}: {text}; configuration `{run.path / 'config.gin'}`")
    table = table_of("setting", columns)
    return Section("Settings and commands", table, lines=lines, is_detail=True)


def _command(arguments: Sequence[str]) -> str:
    program, *rest = arguments
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.stem
    start = ("ttcd", name) if "commands" in path.parts else ("python", program)
    return shlex.join([*(("ttcd",) if name == "ttcd" else start), *rest])


def _environment(path: Path) -> dict[str, Any]:
    """Where a run began; its devices are names, once each."""
    file = path / "environment.json"
    found = read_json(file) if file.exists() else {}
    devices = found.get("devices")
    names = sorted({*map(str, devices)}) if isinstance(devices, list) else []
    return found | {"devices": names}


def _held(model: TransformerConfig, length: int) -> int | None:
    """Bytes that a decoder holds per text, of full attention for one of `length` tokens; None of a
    model that cannot decode. The rows of a mesh in use have to divide among its devices."""
    rows = math.prod(rules.axis_size(axis) for axis in rules.BATCH)
    with contextlib.suppress(UserError):
        return state_bytes(model, rows, max_length=length)["total"] // rows
    return None


def facts(run: Run, row: Row) -> Facts:
    """What answers are made of, from a run and its row."""
    directory = RunDirectory(run.path)
    model, data = model_config(directory), directory.read_part("data")
    has_memory = method_named(model.method).layers != "none"
    return Facts(
        method=model.label,
        has_memory=has_memory and switched_off(model, length=1) != model,
        data=json.dumps(data, sort_keys=True),
        window=model.stream_window,
        steps=row["steps"],
        device=row["device"],
        tokens_per_second=run.speed,
        flops=row["FLOPs per token"],
        state=_held(model, row["tokens per row"]),
    )


def write_report(
    path: Path,
    runs: Sequence[Run],
    results: Mapping[str, list[Results]],
    pictures: Path,
    *,
    between: Sequence[str] = (),
    others: Sequence[Section] = (),
    next_steps: Sequence[str] = (),
) -> list[Section]:
    """Writes the page `path` of `runs`, those of `results` by name, and `others`, with pictures in
    a folder; returns its sections, but for the settings."""
    rows = run_rows(runs)
    known = {run.label: facts(run, row) for run, row in zip(runs, rows, strict=True)}
    with coloured_by_run({name: x.method for name, x in known.items()}) as colours:
        story = task_sections(results, pictures, between, controls(known))
        training = training_sections(runs, pictures)
    if not story:
        training = [x._replace(is_detail=False) for x in training]
    last = [settings_section(runs, rows)] if runs else []
    sections = [*story, *others, *training]
    options = {"colours": colours, "sections": [*sections, *last], "next_steps": next_steps}
    options |= {"answers": answers(measured(results), known)} if runs else {}
    title = " and ".join(x.label for x in runs) or "Measurements"
    write_page(path, title=title, runs=first_columns(rows), **options)
    return sections


class RunPage(Tracker):
    """The page of a run, `index.html` in its directory, anew at every evaluation."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, step: int, record: dict[str, Any]) -> None:
        """`record`: the results of the run's tasks at this step, by task."""
        results = [*record.values()]
        run = Run.read(results[0].label, self._directory)
        with tempfile.TemporaryDirectory() as pictures:
            page = self._directory / "index.html"
            write_report(page, [run], {run.label: results}, Path(pictures))
