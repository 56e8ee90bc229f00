"""The tables and the page of a study."""

import statistics
from pathlib import Path
from typing import Any

from ttcd_kernels.table import Row, format_table

from experiments.study.runs import StudyConfig, results_file, run_dir
from ttcd_jax.files import write_whole
from ttcd_jax.measure.by_document import (
    DocumentTask,
    Means,
    cells,
    differences,
    draw_curves,
    means_of,
)
from ttcd_jax.measure.page import Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run, plot_lines
from ttcd_jax.measure.results import check_comparable, damage_named, read_results
from ttcd_jax.measure.task import MEMORY_OFF, MEMORY_ON, Records, Series, Task
from ttcd_jax.run.directory import METRICS
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.units import printable

# Metrics of fast layers, and what they are.
_WATCHED = {"memory_ratio": "|eta S| / |W_base|", "gate_mean": "mean of the gate beta"}
_STEPS = 12  # rows of its table

type Measured = dict[str, dict[int, Series]]  # by recipe and seed


def write_study(config: StudyConfig, texts: dict[str, Path], path: Path) -> None:
    """Prints the tables of all runs that were evaluated, and writes them with pictures into
    `index.html`, and alone into `tables.txt`."""
    sections = []
    with coloured_by_run([*config.files()]) as colours:
        for text in texts:
            for task in config.evaluations:
                output = path / "pictures" / text
                with damage_named(f"results.json of task {task.name} on {text} in {path}"):
                    measured = _measured(config, task, text, path)
                    for section in _sections(task, text, measured, output) if measured else ():
                        pictures = [_placed(picture, output) for picture in section.pictures]
                        sections.append(section._replace(pictures=pictures))
        sections += [x for name in _WATCHED if (x := _by_step(config, path, name))]
    runs = [_facts(run_dir(path, *run), *run) for run in config.chosen()]
    tables = [("Runs", [run for run in runs if run]), *((x.title, x.table) for x in sections)]
    tables = "\n".join(f"{title}\n{format_table(table)}\n" for title, table in tables)
    write_whole(path / "tables.txt", tables)
    write_page(
        path / "index.html",
        title=f"Study: {', '.join(config.files())}",
        runs=[run for run in runs if run],
        colours=colours,
        sections=sections,
    )
    print(tables)
    if (path / "index.html").exists():
        print(printable(f"page {path / 'index.html'}"))


def _measured(config: StudyConfig, task: Task, text: str, path: Path) -> Measured:
    found: Measured = {}
    results = []
    for name, seed in config.chosen():
        file = results_file(run_dir(path, name, seed), task, name, text)
        if file.exists():
            results.append(read_results(file))
            series = results[-1]["series"]
            old = f"{name}, {text}"
            found.setdefault(name, {})[seed] = {
                name + label.removeprefix(old): records for label, records in series.items()
            }
    if results:
        check_comparable(type(task), results)
    return found


def _sections(task: Task, text: str, measured: Measured, output: Path) -> list[Section]:
    """The means of all seeds, with their differences from the base."""
    title = f"{task.title} ({text})"
    united: Series = {}
    for seeds in measured.values():
        for label in next(iter(seeds.values())):
            united[label] = [record for series in seeds.values() for record in series[label]]
    if not isinstance(task, DocumentTask):
        return [Section(title, task.table(united), task.pictures(output, united, None))]
    kind = type(task)
    base, shown = next(iter(measured)), {}
    for label, records in united.items():
        if not label.endswith(MEMORY_OFF):
            shown[label.removesuffix(f", {MEMORY_ON}")] = records
    pairs = {
        name: (records, _of_seeds(measured[base], measured[name]))
        for name, records in shown.items()
        if name != base
    }

    def rows_of(curves: dict[str, tuple[list[Any], Means]]) -> list[Row]:
        return [
            {"recipe": label} | {str(name): cell for name, cell in cells(*curve).items()}
            for label, curve in curves.items()
        ]

    def by_key(record: dict[str, Any]) -> Any:
        return record[kind.key]

    means = {label: (x, kind.shown(y)) for label, (x, y) in means_of(united, by_key)[0].items()}
    found = [
        Section(f"{title}: {kind.value}", rows_of(means), kind.pictures(output, shown, None)),
        Section(f"{title}: every seed, all tokens", _by_seed(measured), ()),
    ]
    if pairs:
        curves = {label: differences(*pair, kind.place) for label, pair in pairs.items()}
        picture = Path(f"{kind.name}_from_{base}.png")
        draw_curves(output / picture, f"{title} - {base}", kind.x_label, "nats per token", curves)
        sentence = f"Below 0 a recipe is better than {base} on the same tokens, mean of its seeds."
        table = rows_of({label: differences(*pair, by_key) for label, pair in pairs.items()})
        pictures = [Picture(picture, sentence)]
        found.insert(1, Section(f"{title}: nats per token, less {base}", table, pictures))
    return found


def _placed(picture: Picture, output: Path) -> Picture:
    return picture._replace(path=(output / picture.path).absolute())


def _of_seeds(base: dict[int, Series], seeds: dict[int, Series]) -> Records:
    """The records of the base, of the same seeds as another recipe's."""
    (label,) = {label for series in base.values() for label in series if MEMORY_OFF not in label}
    return [record for seed in seeds if seed in base for record in base[seed][label]]


def _by_seed(measured: Measured) -> list[Row]:
    """Nats per token over all records, by recipe and seed, and their standard deviation."""
    rows = []
    for seeds in measured.values():
        for label in next(iter(seeds.values())):
            means = {
                f"seed {seed}": sum(x["nll"] for x in series[label] if x["document"] is not None)
                / sum(x["tokens"] for x in series[label] if x["document"] is not None)
                for seed, series in seeds.items()
            }
            spread = statistics.stdev(means.values()) if len(means) > 1 else None
            mean = statistics.mean(means.values())
            rows.append({"recipe": label} | means | {"mean": mean, "deviation": spread})
    return rows


def _by_step(config: StudyConfig, path: Path, metric: str) -> Section | None:
    """A metric by step, the mean of the layers and seeds of every recipe that has it."""
    found: dict[str, dict[int, list[float]]] = {}
    for name, seed in config.chosen():
        for record in read_metrics(run_dir(path, name, seed) / METRICS):
            values = [x for key, x in record.items() if key.startswith(metric) and x is not None]
            if values:
                found.setdefault(name, {}).setdefault(record["step"], []).extend(values)
    if not found:
        return None
    means = {
        name: {step: statistics.mean(x) for step, x in sorted(steps.items())}
        for name, steps in found.items()
    }
    picture = path / "pictures" / f"{metric}.png"
    lines = {name: ([*steps], [*steps.values()]) for name, steps in means.items()}
    plot_lines(picture, title=_WATCHED[metric], x_label="step", y_label=metric, series=lines)
    steps = sorted({step for x in means.values() for step in x})
    rows = [
        {"step": step} | {name: x.get(step) for name, x in means.items()}
        for step in steps[:: -(-len(steps) // _STEPS)]
    ]
    sentence = f"{_WATCHED[metric]} by step, mean over layers and seeds."
    return Section(f"{_WATCHED[metric]} by step", rows, [Picture(picture.absolute(), sentence)])


def _facts(folder: Path, name: str, seed: int) -> Row | None:
    """The last step of a run, its training loss, speed and memory."""
    metrics = [x for x in read_metrics(folder / METRICS) if "loss" in x]
    if not metrics:
        return None
    last = metrics[-1]
    memory = {key: x for key, x in last.items() if key.startswith(("memory_ratio", "gate_mean"))}
    speed = statistics.median(x["tokens_per_second"] for x in metrics)
    step, loss = (last[key] for key in ("step", "loss"))
    return {"run": name, "seed": seed, "step": step, "loss": loss, "tokens/s": speed} | memory
