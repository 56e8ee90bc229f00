"""The tables and the page of a study."""

import operator
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttcd_kernels.table import Row, format_table

from experiments.report.sections import Run, run_rows, training_sections
from experiments.study.runs import StudyConfig, results_file, run_dir
from ttcd_jax.files import write_whole
from ttcd_jax.measure.by_document import (
    Curves,
    DocumentTask,
    cells,
    differences,
    draw_curves,
    means_of,
)
from ttcd_jax.measure.page import Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run
from ttcd_jax.measure.results import check_comparable, read_results
from ttcd_jax.measure.task import MEMORY_OFF, MEMORY_ON, Series, Task
from ttcd_jax.units import printable

type Measured = dict[str, dict[int, Series[Any]]]  # by recipe and seed


def write_study(config: StudyConfig, texts: dict[str, Path], path: Path) -> None:
    """Prints the tables of all runs that were evaluated, and writes them with pictures into
    `index.html`, and alone into `tables.txt`."""
    folders = {f"{name}, seed {seed}": run_dir(path, name, seed) for name, seed in config.chosen()}
    runs = [run for run in map(Run.read, folders, folders.values()) if run.metrics]
    sections = []
    with coloured_by_run([*config.files()]) as colours:
        for text in texts:
            for task in config.evaluations:
                if measured := _measured(config, task, text, path):
                    sections += _sections(task, text, measured, path / "pictures" / text)
        sections += training_sections(runs, path / "pictures")
    rows = run_rows(runs)
    tables = [("Runs", rows), *((section.title, section.table) for section in sections)]
    tables = "\n".join(f"{title}\n{format_table(table)}\n" for title, table in tables)
    write_whole(path / "tables.txt", tables)
    title = f"Study: {', '.join(config.files())}"
    write_page(path / "index.html", title=title, runs=rows, colours=colours, sections=sections)
    print(tables)
    if (path / "index.html").exists():
        print(printable(f"page {path / 'index.html'}"))


def _measured(config: StudyConfig, task: Task, text: str, path: Path) -> Measured:
    found: Measured = {}
    results = []
    for name, seed in config.chosen():
        file = results_file(run_dir(path, name, seed), task, name, text)
        if file.exists():
            results.append(read_results(file).renamed(f"{name}, {text}", name))
            found.setdefault(name, {})[seed] = results[-1].series
    if results:
        check_comparable(results)
    return found


def _sections(task: Task, text: str, measured: Measured, output: Path) -> list[Section]:
    """The means of all seeds, with their differences from the base."""
    title, kind = f"{task.title} ({text})", type(task)
    united: Series[Any] = {}
    for seeds in measured.values():
        for label in next(iter(seeds.values())):
            united[label] = [record for series in seeds.values() for record in series[label]]
    if not isinstance(task, DocumentTask):
        return [Section(title, kind.table(united), _pictures(kind, united, output))]
    assert issubclass(kind, DocumentTask)
    base, shown = next(iter(measured)), {}
    for label, records in united.items():
        if not label.endswith(MEMORY_OFF):
            shown[label.removesuffix(f", {MEMORY_ON}")] = records
    pairs = {
        name: (records, _of_seeds(measured[base], measured[name]))
        for name, records in shown.items()
        if name != base
    }
    by_key = operator.attrgetter(kind.key)
    means = {label: (x, kind.shown(y)) for label, (x, y) in means_of(united, by_key)[0].items()}
    pictures = _pictures(kind, shown, output)
    found = [Section(f"{title}: {kind.value}", _rows(means), pictures)]
    if pairs:
        curves = {label: differences(*pair, kind.x) for label, pair in pairs.items()}
        picture = (output / f"{kind.name}_from_{base}.png").absolute()
        draw_curves(picture, f"{title} - {base}", kind.x_label, "nats per token", curves)
        sentence = f"Below 0 a recipe is better than {base} on the same tokens, mean of its seeds."
        table = _rows({label: differences(*pair, by_key) for label, pair in pairs.items()})
        name = f"{title}: nats per token, less {base}"
        found.append(Section(name, table, [Picture(picture, sentence)]))
    return [*found, Section(f"{title}: every seed, all tokens", _by_seed(measured), ())]


def _pictures(kind: type[Task], series: Series[Any], output: Path) -> list[Picture]:
    pictures = kind.pictures(output, series, None)
    return [x._replace(path=(output / x.path).absolute()) for x in pictures]


def _rows(curves: Curves) -> list[Row]:
    return [
        {"recipe": label} | {str(name): cell for name, cell in cells(*curve).items()}
        for label, curve in curves.items()
    ]


def _of_seeds(base: dict[int, Series[Any]], seeds: dict[int, Series[Any]]) -> list[Any]:
    """The records of the base, of the same seeds as another recipe's."""
    (label,) = {label for series in base.values() for label in series if MEMORY_OFF not in label}
    return [record for seed in seeds if seed in base for record in base[seed][label]]


def _by_seed(measured: Measured) -> list[Row]:
    """Nats per token over all records, by recipe and seed, and their standard deviation."""
    rows = []
    for seeds in measured.values():
        for label in next(iter(seeds.values())):
            means = {f"seed {seed}": _mean(series[label]) for seed, series in seeds.items()}
            spread = statistics.stdev(means.values()) if len(means) > 1 else None
            mean = statistics.mean(means.values())
            rows.append({"recipe": label} | means | {"mean": mean, "deviation": spread})
    return rows


def _mean(records: Sequence[Any]) -> float:
    counted = [x for x in records if x.document is not None]
    return sum(x.nll for x in counted) / sum(x.tokens for x in counted)
