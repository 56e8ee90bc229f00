"""The runs of a study, their training, in a process each, and their evaluations; its tables and
its page."""

import dataclasses
import functools
import itertools
import operator
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any

import numpy as np
from absl import logging
from ttcd_kernels.table import Row, format_table

from experiments import cli
from experiments.report.sections import Run, run_rows, training_sections
from ttcd_jax.config import DISTINCT, Config, NonNegative, Positive
from ttcd_jax.data.corpus import load_documents
from ttcd_jax.data.sources import MixtureConfig, TextConfig
from ttcd_jax.errors import UserError
from ttcd_jax.files import read_json, write_json, write_whole
from ttcd_jax.measure import by_document
from ttcd_jax.measure.by_document import Curves, DocumentTask, differences
from ttcd_jax.measure.page import Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run
from ttcd_jax.measure.results import FILE, check_comparable, evaluate, folder_name, read_results
from ttcd_jax.measure.task import MEMORY_OFF, MEMORY_ON, Series, Subject, Task, digest
from ttcd_jax.registry import IMPORTED_MODULES
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig, accepted_changes
from ttcd_jax.run.directory import RunDirectory, load_run
from ttcd_jax.units import printable

type Measured = dict[str, dict[int, Series[Any]]]  # by recipe and seed
type Texts = dict[str, Path]  # folders of pieces by the name of their corpus


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig(Config):
    """`recipes`: .gin files of runs that differ in their method alone, the first of which is the
    base of all differences; each is trained with all `seeds`, those of `once` with the first.

    All are evaluated by `evaluations` on the held-out text of every corpus they are trained on, cut
    into pieces of `piece_bytes`, at most `max_pieces` of them, taken evenly.
    """

    recipes: Annotated[tuple[str, ...], DISTINCT]
    once: tuple[str, ...] = ()
    seeds: Annotated[tuple[NonNegative, ...], DISTINCT] = (0, 1, 2)
    evaluations: tuple[Task, ...] = ()
    piece_bytes: Positive = 4096
    max_pieces: Positive = 16

    def validate(self) -> None:
        names = [PurePath(file).stem for file in (*self.recipes, *self.once)]
        if len(self.files()) < len(names):
            raise UserError(f"two recipes of the study have one name: {', '.join(names)}")

    def files(self) -> dict[str, str]:
        """The .gin file of every recipe, by name."""
        return {PurePath(file).stem: file for file in (*self.recipes, *self.once)}

    def chosen(self, only: Sequence[str] = ()) -> list[tuple[str, int]]:
        """(recipe, seed) of all runs, or of the recipes `only`; all first seeds come first."""
        names = self.files()
        for name in only:
            if name not in names:
                raise UserError(f"--only={name} is not one of the study's {', '.join(names)}")
        return [
            (name, seed)
            for seed in self.seeds
            for name, file in names.items()
            if (not only or name in only) and (file not in self.once or seed == self.seeds[0])
        ]


def results_file(folder: Path, task: Task, name: str, text: str) -> Path:
    """The results of a task on a text in a run directory."""
    return folder / "eval" / folder_name(task.name, f"{name}, {text}") / FILE


def held_out_texts(config: StudyConfig, params: Sequence[str], path: Path) -> Texts:
    """Writes the pieces of the held-out text of every corpus into a folder of their own, whose name
    has their digest, so that results on other pieces are made again; the folders by name.

    Raises `UserError` for recipes on other data, or none, for two corpora of one name, and for
    held-out text that is too short.
    """
    load = functools.partial(load_config, RunConfig, params=params, config_dir=cli.CONFIG_DIR)
    data, texts, size = load(config.recipes[0]).data, {}, config.piece_bytes
    for file in config.files().values():
        if load(file).data != data:
            raise UserError(f"the recipes of a study have one data configuration, {file} another")
    for part in data.parts if isinstance(data, MixtureConfig) else (data,):
        if not isinstance(part, TextConfig):
            raise UserError(f"a study is evaluated on text, not on {type(part).__name__}")
        name = "stdlib" if part.corpus.path is None else Path(part.corpus.path).name
        pieces = [
            document.text[start : start + size]
            for document in load_documents(part.corpus, "validation")
            for start in range(0, len(document.text) - size + 1, size)
        ]
        if not pieces:
            text = f"no held-out document of {name} has {size} bytes"
            raise UserError(f"{text}: lower StudyConfig.piece_bytes")
        if name in texts:
            raise UserError(f"two corpora of the study are named {name}: rename one of the folders")
        chosen = np.linspace(0, len(pieces) - 1, min(config.max_pieces, len(pieces))).astype(int)
        # A cut may be inside a character.
        shown = [pieces[index].decode(errors="ignore") for index in chosen]
        write_json(path / "study.json", config.to_dict())  # so that these are no run's documents
        texts[name] = path / "texts" / f"{name}-{digest(shown)[:12]}"
        for number, text in enumerate(shown):
            write_whole(texts[name] / f"{number:03}.txt", text)
    return texts


def compute(
    config: StudyConfig, name: str, seed: int, params: Sequence[str], texts: Texts, path: Path
) -> None:
    """Trains and evaluates what is missing of a run. Raises `UserError` where training failed, and
    for a run of another configuration."""
    folder, file = path / f"{name}-{seed}", config.files()[name]
    params = (*params, f"RunConfig.seed={seed}")
    if (directory := RunDirectory(folder)).is_claimed:
        wanted = load_config(RunConfig, file, params, config_dir=cli.CONFIG_DIR)
        accepted_changes(folder, directory.read_config(), wanted.to_dict(), None)
    missing = []
    for task, text in itertools.product(config.evaluations, texts):
        task = task.replace(text=str(texts[text]))
        results = results_file(folder, task, name, text)
        found: Any = read_json(results) if results.exists() else {}
        if found.get("options") != task.to_dict():
            missing.append((task, text))
    if config.evaluations and not missing:
        return
    logging.info("study: %s, seed %d", name, seed)
    command = [sys.executable, "-m", "experiments.launch", f"--gin={file}"]
    command += [f"--param={text}" for text in params]
    command += [f"--import={name}" for name in IMPORTED_MODULES]
    if status := subprocess.run([*command, f"--run_dir={folder}"], check=False).returncode:
        raise UserError(f"{folder.name} stopped with status {status}: {' '.join(command)}")
    run, data = load_run(folder), directory.read_part("data")
    for task, text in missing:
        subject = Subject(run.model, run.tokenizer, data, folder, f"{name}, {text}")
        evaluate(task, subject, run.step).write()


def write_study(config: StudyConfig, texts: Texts, path: Path) -> list[Section]:
    """Prints the tables of all runs that were evaluated, and writes them with pictures into
    `index.html`, and alone into `tables.txt`; returns them."""
    folders = {f"{x}, seed {seed}": path / f"{x}-{seed}" for x, seed in config.chosen()}
    runs = [run for run in map(Run.read, folders, folders.values()) if run.metrics]
    sections = []
    with coloured_by_run([*config.files()]) as colours:
        for text, task in itertools.product(texts, config.evaluations):
            if measured := _measured(config, task, text, path):
                sections += _sections(task, text, measured, path / "pictures" / text)
        sections += training_sections(runs, path / "pictures")
    rows = run_rows(runs)
    shown = [Section("Runs", rows), *sections]
    tables = "\n".join(f"{x.title}\n{format_table(x.table)}\n" for x in shown)
    write_whole(path / "tables.txt", tables)
    title = f"Study: {', '.join(config.files())}"
    write_page(path / "index.html", title=title, runs=rows, colours=colours, sections=sections)
    print(tables)
    if (path / "index.html").exists():
        print(printable(f"page {path / 'index.html'}"))
    return shown


def _measured(config: StudyConfig, task: Task, text: str, path: Path) -> Measured:
    found, results = {}, []
    for name, seed in config.chosen():
        file = results_file(path / f"{name}-{seed}", task, name, text)
        if file.exists():
            results.append(read_results(file).renamed(f"{name}, {text}", name))
            found.setdefault(name, {})[seed] = results[-1].series
    if results:
        check_comparable(results)
    return found


def _sections(task: Task, text: str, measured: Measured, output: Path) -> list[Section]:
    """The means of all seeds, with their differences from the base; every seed."""
    title, kind = f"{task.title} ({text})", type(task)
    united: Series[Any] = {}
    for seeds in measured.values():
        for label in next(iter(seeds.values())):
            united[label] = [record for series in seeds.values() for record in series[label]]
    if not isinstance(task, DocumentTask):
        return [Section(title, kind.table(united), _pictures(kind, united, output))]
    assert issubclass(kind, DocumentTask)
    base, by_key = next(iter(measured)), operator.attrgetter(kind.key)
    shown = {x.removesuffix(f", {MEMORY_ON}"): y for x, y in united.items() if MEMORY_OFF not in x}
    pairs = {x: (y, _of_seeds(measured[base], measured[x])) for x, y in shown.items() if x != base}
    means, _ = by_document.means_of(united, by_key)
    table = _rows({label: (x, kind.shown(y)) for label, (x, y) in means.items()})
    found = [Section(f"{title}: {kind.value}", table, _pictures(kind, shown, output))]
    if pairs:
        curves = {label: differences(*pair, kind.x) for label, pair in pairs.items()}
        picture = (output / f"{kind.name}_from_{base}.png").absolute()
        names = f"{title} - {base}", kind.x_label, "nats per token"
        by_document.draw_curves(picture, *names, curves)
        sentence = f"Below 0 a recipe is better than {base} on the same tokens, mean of its seeds."
        table = _rows({label: differences(*pair, by_key) for label, pair in pairs.items()})
        name = f"{title}: nats per token, less {base}"
        found.append(Section(name, table, [Picture(picture, sentence)]))
    return [*found, Section(f"{title}: every seed, all tokens", _by_seed(measured))]


def _pictures(kind: type[Task], series: Series[Any], output: Path) -> list[Picture]:
    drawn = kind.pictures(output, series, None)
    return [x._replace(path=(output / x.path).absolute()) for x in drawn]


def _rows(curves: Curves) -> list[Row]:
    return [
        {"recipe": label} | {str(name): cell for name, cell in by_document.cells(*curve).items()}
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
            found = {f"seed {seed}": series[label] for seed, series in seeds.items()}
            curves, _ = by_document.means_of(found, lambda x: None if x.document is None else 0)
            means = {name: float(x.mean[0]) for name, (_, x) in curves.items()}
            spread = statistics.stdev(means.values()) if len(means) > 1 else None
            mean = statistics.mean(means.values())
            rows.append({"recipe": label} | means | {"mean": mean, "deviation": spread})
    return rows
