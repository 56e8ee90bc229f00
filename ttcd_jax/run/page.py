"""The page of several runs: what it answers, a row per run, then a section for everything that was
measured. Training writes that of its own run at every evaluation."""

import contextlib
import functools
import json
import math
import re
import shlex
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ttcd_kernels.measure import environment
from ttcd_kernels.table import Row, cells

from ttcd_jax import units
from ttcd_jax.data.sources import row_length
from ttcd_jax.errors import UserError
from ttcd_jax.files import read_json, write_whole
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.measure.answers import Facts, answers, controls, place
from ttcd_jax.measure.page import Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run, plot_lines
from ttcd_jax.measure.results import Results, measured, series_of, task_sections
from ttcd_jax.measure.task import TASKS, table_of
from ttcd_jax.methods import method_named
from ttcd_jax.models.config import TransformerConfig, switched_off, training_flops_per_token
from ttcd_jax.run.config import by_path
from ttcd_jax.run.directory import EVALUATIONS, METRICS, RunDirectory, model_config
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.run.trackers import Tracker
from ttcd_jax.sharding import rules
from ttcd_jax.storage import to_path
from ttcd_jax.train.state import num_params

type BySeries = dict[str, dict[int, float]]  # values by step
_CURVES = {  # of a metric: title, name of the axis
    "loss": ("Training and its speed", "training loss (nats per token)"),
    "memory_ratio": ("Size of the memory, mean over layers", "|eta S| / |W_base|"),
    "gate_mean": ("Gate of the memory, mean over layers", "mean of beta"),
    "window_share": ("Share of the windows in what is written, mean over layers", "share of |e|^2"),
}
COLUMNS = ("run", "method", "parameters", "steps", "tokens per row", "FLOPs per token", "tokens/s")
COLUMNS += ("held per text",)
_ABSOLUTE = re.compile(r"(?<![\w./])/[\w.+-]+(/[\w.+-]+)+")
_LAST = {"memory_ratio": "|eta S|/|W|", "gate_mean": "gate", "window_share": "window share"}


class Run:
    """A run of a page: its name there, its metrics, and what its directory says."""

    def __init__(self, label: str, path: Path) -> None:
        directory, file = RunDirectory(path), path / "environment.json"
        self.label, self.path, self.metrics = label, path, read_metrics(path / METRICS)
        self.config, self.model = directory.read_config(), model_config(directory)
        self.data = directory.read_part("data")
        self.length = row_length(self.data)
        self.environment = read_json(file) if file.exists() else {}

    @functools.cached_property
    def facts(self) -> Facts:
        """What answers are made of."""
        model, devices = self.model, self.environment.get("devices")
        speeds = [x for x in self.numbers("tokens_per_second").values() if x]
        has_memory = method_named(model.method).layers != "none"
        return Facts(
            method=model.label,
            has_memory=has_memory and switched_off(model, length=1) != model,
            data=json.dumps(self.data, sort_keys=True),
            window=model.stream_window,
            steps=max((x["step"] for x in self.metrics), default=self.config.get("steps")),
            device=", ".join(sorted({*map(str, devices)}) if isinstance(devices, list) else []),
            tokens_per_second=statistics.median(speeds) if speeds else None,
            flops=float(training_flops_per_token(model, self.length)),
            state=_held(model, self.length),
        )

    @functools.cached_property
    def row(self) -> Row:
        """Its row in the first table of a page, and behind `COLUMNS` what is for the settings."""
        own, size = self.facts, self.config.get("batch_size")
        tokens = self.length * size * own.steps if size and own.steps else None
        row = {
            "run": self.label,
            "method": own.method,
            "parameters": num_params(self.model),
            "steps": own.steps,
            "tokens per row": self.length,
            "FLOPs per token": own.flops,
            "training FLOPs": tokens and own.flops * tokens,
            "tokens/s": own.tokens_per_second,
            "held per text": None if own.state is None else units.size(own.state),
            "device": own.device,
        }
        return row | {column: text for name, column in _LAST.items() if (text := self._last(name))}

    def numbers(self, name: str) -> dict[int, float]:
        """The values of a metric by step, the mean over layers, where they are numbers."""
        found = {}
        for record in self.metrics:
            values = [x for key, x in record.items() if key.partition("/")[0] == name]
            if values and all(map(_is_number, values)):
                found[record["step"]] = statistics.fmean(values)
        return found

    def evaluations(self) -> dict[tuple[str, str, str], BySeries]:
        """What was evaluated in training, by task, bucket and digests of the cases: of every series
        the bucket of everything, else the last one."""
        file, found = self.path / EVALUATIONS, {}
        cases = read_json(file) if file.is_file() else {}
        for record in self.metrics:
            last = {}
            for key, x in record.items():
                name, _, rest = key.partition("/")
                series, _, bucket = rest.rpartition("/")
                if name in TASKS and series.startswith(self.model.label):
                    key = name, series_of(series, self.model.label, self.label)
                    if last.get(key, ("",))[0] != TASKS[name].whole:
                        last[key] = bucket, x
                elif name in TASKS and series == TASKS[name].value:  # a row is a series
                    last[name, f"{self.label}, {TASKS[name].key} {bucket}"] = "", x
            for (name, series), (bucket, x) in last.items():
                digests = str([y for task, y in cases.items() if task.startswith(f"{name} ")])
                if _is_number(x):
                    lines = found.setdefault((name, bucket, digests), {})
                    lines.setdefault(series, {})[record["step"]] = x
        return found

    def _last(self, name: str) -> str:
        """The medians of the last ten values of a metric, by layer."""
        layers: dict[str, list[float]] = {}
        for key, x in (item for record in self.metrics for item in record.items()):
            if key.partition("/")[0] == name and isinstance(x, float):
                layers.setdefault(key, []).append(x)
        return ", ".join(f"{statistics.median(x[-10:]):.2g}" for x in layers.values())


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and abs(x) < 1e300


def first_columns(runs: Sequence[Run]) -> list[Row]:
    """The first table of a page."""
    return [{name: run.row[name] for name in COLUMNS} for run in runs]


def training_sections(runs: Sequence[Run], output: Path) -> list[Section]:
    """What was evaluated while runs were trained here; their loss and speed, and how far their
    memory moves the weights: a curve by step, the last value, and those at steps 1, 2, 5, 10, 20
    and so on, where they were logged."""
    sections = _evaluated(runs, output)
    for name, (title, y_label) in _CURVES.items():
        table, lines = [], {}
        for run in runs:
            if found := run.numbers(name):
                lines[run.label] = found
                row = {"run": run.label, "step": max(found), y_label: found[max(found)]}
                if name == "loss":
                    row["tokens/s (median)"] = run.facts.tokens_per_second
                steps = [x for x in found if str(x).rstrip("0") in {"1", "2", "5"}]
                table.append(row | {f"step {x}": found[x] for x in steps})
        if table:
            path = output / ("training.svg" if name == "loss" else f"{name}.svg")
            picture = _by_step(path, title, y_label, lines, f"{title}, by step.")
            sections.append(Section(title, table, [picture], is_detail=True))
    return sections


def _evaluated(runs: Sequence[Run], output: Path) -> list[Section]:
    """A curve of every task that some run was evaluated on at two steps or more; runs that were
    evaluated on the same cases share it."""
    found: dict[tuple[str, str, str], BySeries] = {}
    for run in runs:
        for what, lines in run.evaluations().items():
            found.setdefault(what, {}).update(lines)
    pictures, table = [], []
    for number, ((name, bucket, _), lines) in enumerate(found.items()):
        if max(map(len, lines.values())) < 2:
            continue
        task, path = TASKS[name], output / f"evaluations_{number}.svg"
        value, title = task.unit({})[1], task.title.partition(" by ")[0].rstrip(",")
        best, better = (min, "lower") if task.prefers_less(bucket) else (max, "higher")
        what = f"{value}{place(task, bucket)}" if bucket else value
        sentence = f"{what[:1].upper()}{what[1:]} by step of training: {better} is better."
        pictures.append(_by_step(path, f"{title}, by step", value, lines, sentence))
        for label, values in lines.items():
            last, top = max(values), best(values, key=values.__getitem__)
            row = {"evaluated": label, "measure": what, "last step": last, "last": values[last]}
            table.append(row | {"best": values[top], "best step": top})
    return [Section("Evaluations by step", table, pictures)] if table else []


def _by_step(path: Path, title: str, y_label: str, lines: BySeries, sentence: str) -> Picture:
    series = {name: ([*values], [*values.values()]) for name, values in lines.items()}
    plot_lines(path, series=series, is_log=False, title=title, x_label="step", y_label=y_label)
    return Picture(path.absolute(), sentence)


def settings_section(
    runs: Sequence[Run], results: Mapping[str, Sequence[Results]] | None = None
) -> Section:
    """What made every run, a column each, and the rest of its row: commit, seed and windows, the
    fields in which the runs differ, the steps of its results; above it the commands, and the
    changes since."""
    columns, lines, fields = {}, [], [by_path(run.config) for run in runs]
    names: dict[str, None] = dict.fromkeys(("seed", "model.window", "model.student_window"))
    for name in dict.fromkeys(name for found in fields for name in found):
        if len({str(found.get(name)) for found in fields}) > 1:
            names[name] = None
    for run, found in zip(runs, fields, strict=True):
        rest = {x: cells([{x: y}])[1][0][0] for x, y in run.row.items() if x not in COLUMNS}
        own = {name: str(found[name][1]) for name in names if name in found}
        steps: dict[int, list[str]] = {}
        for x in (results or {}).get(run.label, ()):
            steps.setdefault(x.step, []).append(x.folder)
        if steps:
            evaluated = (f"{step} ({', '.join(steps[step])})" for step in sorted(steps))
            own |= {"evaluated at step": "; ".join(evaluated)}
        columns[run.label] = {"commit": str(run.environment.get("commit"))[:12]} | own | rest
        changes = read_json(run.path / "config.json").get("changes") or ()
        since = ", ".join(f"{x['field']} = {x['new']}" for x in changes)
        text = f"`{_command(run.environment.get('command') or ['unknown'])}`"
        text += f", since then {since}" if since else ""
        lines.append(f"{run.label}: {text}; configuration `{run.path / 'config.gin'}`")
    table = table_of("setting", columns)
    return Section("Settings and commands", table, lines=lines, is_detail=True)


def _command(arguments: Sequence[str]) -> str:
    program, *rest = arguments
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.stem
    start = ("ttcd", name) if "commands" in path.parts else ("python", program)
    return shlex.join([*(("ttcd",) if name == "ttcd" else start), *rest])


def _held(model: TransformerConfig, length: int) -> int | None:
    """Bytes that a decoder holds per text, of full attention for one of `length` tokens; None of a
    model that cannot decode. The rows of a mesh in use have to divide among its devices."""
    rows = math.prod(rules.axis_size(axis) for axis in rules.BATCH)
    with contextlib.suppress(UserError):
        return state_bytes(model, rows, max_length=length)["total"] // rows
    return None


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
    known = {run.label: run.facts for run in runs}
    with coloured_by_run({name: x.method for name, x in known.items()}) as colours:
        story = task_sections(results, pictures, between, controls(known))
        training = training_sections(runs, pictures)
    if not story:
        training = [x._replace(is_detail=False) for x in training]
    sections = [*story, *others, *training]
    write_page(
        path,
        title=(" and ".join(known) or "Measurements") if len(known) < 5 else f"{len(known)} runs",
        runs=first_columns(runs),
        colours=colours,
        sections=[*sections, *([settings_section(runs, results)] if runs else [])],
        next_steps=next_steps,
        answers=answers(measured(results), known),
    )
    return sections


def write_records(
    file: str | Path, sections: Sequence[Section], runs: Sequence[Path], command: str, **facts: Any
) -> None:
    """Writes a line of JSON with what holds for all others: the command, this commit and those of
    the `runs`, this machine and the `facts`, among them what an `interval` is over; then one for
    every row of the `sections`, [mean, half] where a cell has an interval. Absolute paths are DIR,
    as they are those of this machine. `experiments.pages` draws tables of such files."""
    machine, files = environment(), (x / "environment.json" for x in runs)
    found = (machine, *map(read_json, filter(Path.exists, files)))
    count = machine["cpu_count"] if machine["platform"] == "cpu" else jax.device_count()
    commits = sorted({x.get("commit") or "unknown" for x in found})
    head = {"command": command, "commit": ", ".join(commits)}
    head |= {"device": f"{count} x {machine['device']}"} | facts
    rows = [
        {"row": next(iter(row.values())), "section": section.title}
        | {x: _number(cell) for x, cell in row.items() if x != "directory"}
        for section in sections
        for row in section.table
    ]
    if not any(isinstance(x, list) for row in rows for x in row.values()):
        head.pop("interval", None)
    lines = (json.dumps(x, ensure_ascii=False) + "\n" for x in (head, *rows))
    write_whole(to_path(file), _ABSOLUTE.sub("DIR", "".join(lines)))


def _number(cell: Any) -> Any:
    mean, bound, half = str(cell).replace(",", "").partition(" ± ")
    if bound:
        return [float(mean), float(half)]
    alone = mean.removesuffix(" (no interval)")
    return cell if alone == mean else float(alone)


class RunPage(Tracker):
    """The page of a run, `index.html` in its directory, anew at every evaluation."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, step: int, record: dict[str, Any]) -> None:
        """`record`: the results of the run's tasks at this step, by task."""
        results = [*record.values()]
        run = Run(results[0].label, self._directory)
        with tempfile.TemporaryDirectory() as pictures:
            page = self._directory / "index.html"
            write_report(page, [run], {run.label: results}, Path(pictures))
