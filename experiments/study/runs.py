"""The runs of a study, their training, in a process each, and their evaluations; its tables and
its page."""

import dataclasses
import functools
import itertools
import operator
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from absl import logging
from ttcd_kernels.table import Row, format_table

from experiments import cli
from experiments.report.sections import Run, run_rows, training_sections
from ttcd_jax.config import DISTINCT, Config, NonNegative, Positive
from ttcd_jax.data.corpus import load_documents
from ttcd_jax.data.sources import MixtureConfig, TextConfig
from ttcd_jax.data.synthetic.rows import SyntheticConfig
from ttcd_jax.errors import UserError
from ttcd_jax.files import read_json, write_json, write_whole
from ttcd_jax.measure import by_document
from ttcd_jax.measure.by_document import Curves, DocumentTask, means_over_seeds
from ttcd_jax.measure.page import Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run
from ttcd_jax.measure.results import FILE, check_comparable, evaluate, folder_name, read_results
from ttcd_jax.measure.task import MEMORY_OFF, MEMORY_ON, Series, Subject, Task, digest
from ttcd_jax.models.config import has_in_place_memory, layers_with_teacher
from ttcd_jax.registry import IMPORTED_MODULES
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig, accepted_changes
from ttcd_jax.run.directory import RunDirectory, load_run
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.units import printable

type Measured = dict[str, dict[int, Series[Any]]]  # by recipe and seed
MOST_DOCUMENTS = 16  # that a table shows one by one
type Texts = dict[str, Path | None]  # folders of pieces by the name of their corpus; None: drawn
Control = Literal["no_gap", "eta0", "swa", "swa_flops", "gated_delta"]
_GATED_DELTA = (
    *("TransformerConfig.method='gated_deltanet_hybrid'", "DeltaRuleConfig.conv_init='previous'"),
    "TransformerConfig.memory=@DeltaRuleConfig()",
)


class Recipe(NamedTuple):
    """What a study trains: a .gin file under bindings, those of a control among them."""

    config: RunConfig
    file: str
    bindings: tuple[str, ...]
    is_once: bool


def control(name: Control, run: RunConfig) -> tuple[str, ...]:
    """The bindings that make a control of a run; none for a run without such a part."""
    model, length = run.model, run.data.seq_len
    if not has_in_place_memory(model) or (name == "no_gap" and not layers_with_teacher(model)):
        return ()
    seen = model.stream_window
    plain = {"method": "swa" if seen else "full", "memory": None, "fast_layers": (), "window": seen}
    match name:
        case "no_gap":
            return _bound(model.without_gap(length))
        case "eta0":
            return (f"{type(model.settings).__name__}.eta=0.0",)
        case "gated_delta":
            return (*_GATED_DELTA, *_bound({"window": seen}))
        case "swa":
            return _bound(plain)
    models = model, model.replace(**plain)
    cost, least = (training_flops_per_token(x, length) for x in models)
    return (*_bound(plain), f"RunConfig.steps={round(run.steps * cost / least)}")


def _bound(fields: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"TransformerConfig.{name}={value!r}" for name, value in fields.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig(Config):
    """`recipes`: .gin files of runs that differ in their method alone, the first of which is the
    base of all differences; each is trained with all `seeds`, those of `once` with the first.

    `controls` of every recipe with a memory in place are trained beside it as RECIPE_CONTROL, equal
    runs once: "no_gap", the student's window is the teacher's; "eta0", nothing is written, so that
    the convolutions are left; "swa", neither; "swa_flops", the same for as many steps as cost the
    recipe's FLOPs; "gated_delta", after window attention the gated delta rule, whose keys start at
    the token before.

    All are evaluated by `evaluations` on the held-out text of every corpus they are trained on, cut
    into pieces of `piece_bytes`, at most `max_pieces` of them, taken evenly; where they are trained
    on rows that are drawn, on other such rows.
    """

    recipes: Annotated[tuple[str, ...], DISTINCT]
    once: tuple[str, ...] = ()
    controls: tuple[Control, ...] = ()
    seeds: Annotated[tuple[NonNegative, ...], DISTINCT] = (0, 1, 2)
    evaluations: tuple[Task, ...] = ()
    piece_bytes: Positive = 4096
    max_pieces: Positive = 16

    def validate(self) -> None:
        names = [PurePath(file).stem for file in (*self.recipes, *self.once)]
        if len(set(names)) < len(names):
            raise UserError(f"two recipes of the study have one name: {', '.join(names)}")

    def runs(self, params: Sequence[str] = ()) -> dict[str, Recipe]:
        """Every recipe under the bindings `params`, its controls after it, by name."""
        load = functools.partial(load_config, RunConfig, config_dir=cli.CONFIG_DIR)
        files = (*self.recipes, *self.once)
        recipes = (Recipe(load(x, params), x, tuple(params), x in self.once) for x in files)
        found = {PurePath(recipe.file).stem: recipe for recipe in recipes}
        result, configs = {}, [recipe.config for recipe in found.values()]
        for name, recipe in found.items():
            result[name] = recipe
            for kind in self.controls:
                bindings, label = (*params, *control(kind, recipe.config)), f"{name}_{kind}"
                if (config := load(recipe.file, bindings)) in configs:
                    continue
                if label in found:
                    raise UserError(f"{found[label].file} is not the control {kind}: rename it")
                configs.append(config)
                result[label] = recipe._replace(config=config, bindings=bindings)
        return result

    def chosen(self, runs: dict[str, Recipe], only: Sequence[str] = ()) -> list[tuple[str, int]]:
        """(recipe, seed) of all runs, or of the recipes `only`; all first seeds come first."""
        for name in only:
            if name not in runs:
                raise UserError(f"--only={name} is not one of the study's {', '.join(runs)}")
        return [
            (name, seed)
            for seed in self.seeds
            for name, recipe in runs.items()
            if (not only or name in only) and (not recipe.is_once or seed == self.seeds[0])
        ]


def results_file(folder: Path, task: Task, name: str, text: str) -> Path:
    """The results of a task on a text in a run directory."""
    return folder / "eval" / folder_name(task.name, f"{name}, {text}") / FILE


def held_out_texts(config: StudyConfig, runs: dict[str, Recipe], path: Path) -> Texts:
    """Writes the pieces of the held-out text of every corpus into a folder of their own, whose name
    has their digest, so that results on other pieces are made again; the folders by name.

    Raises `UserError` for recipes on other data, or none, for two corpora of one name, and for
    held-out text that is too short.
    """
    data, texts, size = next(iter(runs.values())).config.data, {}, config.piece_bytes
    for recipe in runs.values():
        if recipe.config.data != data:
            raise UserError(
                f"the recipes of a study have one data configuration, {recipe.file} another"
            )
    if isinstance(data, SyntheticConfig):
        return {data.kind: None}
    for part in data.parts if isinstance(data, MixtureConfig) else (data,):
        if not isinstance(part, TextConfig):
            raise UserError(f"a study is evaluated on text, not on {type(part).__name__}")
        name = "stdlib" if part.corpus.path is None else Path(part.corpus.path).name
        pieces = [
            (document.name, document.text[start : start + size])
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
        shown = [pieces[index][1].decode(errors="ignore") for index in chosen]
        write_json(path / "study.json", config.to_dict())  # so that these are no run's documents
        texts[name] = folder = path / "texts" / f"{name}-{digest(shown)[:12]}"
        names = [pieces[index][0] for index in chosen]
        write_json(_names_file(folder), {"documents": names})
        for number, text in enumerate(shown):
            write_whole(folder / f"{number:03}.txt", text)
    return texts


def _names_file(folder: Path) -> Path:
    """That of the documents of the pieces in a folder."""
    return folder.parent / f"{folder.name}.json"


def compute(
    config: StudyConfig, name: str, seed: int, recipe: Recipe, texts: Texts, path: Path
) -> None:
    """Trains and evaluates what is missing of a run. Raises `UserError` where training failed, and
    for a run of another configuration."""
    folder, params = path / f"{name}-{seed}", (*recipe.bindings, f"RunConfig.seed={seed}")
    if (directory := RunDirectory(folder)).is_claimed:
        wanted = recipe.config.replace(seed=seed).to_dict()
        accepted_changes(folder, directory.read_config(), wanted, None)
    missing = []
    for task, text in itertools.product(config.evaluations, texts):
        if (pieces := texts[text]) is not None:
            task = task.replace(text=str(pieces))
        results = results_file(folder, task, name, text)
        found: Any = read_json(results) if results.exists() else {}
        if found.get("options") != task.to_dict():
            missing.append((task, text))
    if config.evaluations and not missing:
        return
    logging.info("study: %s, seed %d", name, seed)
    command = [sys.executable, "-m", "experiments.launch", f"--gin={recipe.file}"]
    command += [f"--param={text}" for text in params]
    command += [f"--import={name}" for name in IMPORTED_MODULES]
    if status := subprocess.run([*command, f"--run_dir={folder}"], check=False).returncode:
        raise UserError(f"{folder.name} stopped with status {status}: {' '.join(command)}")
    trained, data = load_run(folder), directory.read_part("data")
    for task, text in missing:
        subject = Subject(trained.model, trained.tokenizer, data, folder, f"{name}, {text}")
        evaluate(task, subject, trained.step).write()


def write_study(
    config: StudyConfig, recipes: dict[str, Recipe], texts: Texts, path: Path
) -> list[Section]:
    """Prints the tables of all runs that were evaluated, and writes them with pictures into
    `index.html`, and alone into `tables.txt`; returns them."""
    chosen = config.chosen(recipes)
    folders = {f"{x}, seed {seed}": path / f"{x}-{seed}" for x, seed in chosen}
    runs = [run for run in map(Run.read, folders, folders.values()) if run.metrics]
    sections = []
    full = next((x for x, y in recipes.items() if y.config.model.method == "full"), None)
    with coloured_by_run([*recipes]) as colours:
        for text, task in itertools.product(texts, config.evaluations):
            if measured := _measured(chosen, task, text, path):
                pieces = texts[text]
                names: Any = pieces and read_json(_names_file(pieces))["documents"]
                output = path / "pictures" / text
                sections += _sections(task, text, measured, output, names)
                sections += _headroom(task, text, measured, full)
        sections += training_sections(runs, path / "pictures")
    rows = run_rows(runs)
    shown = [Section("Runs", rows), *sections]
    tables = "\n".join(f"{x.title}\n{format_table(x.table)}\n" for x in shown)
    write_whole(path / "tables.txt", tables)
    title = f"Study: {', '.join(recipes)}"
    write_page(path / "index.html", title=title, runs=rows, colours=colours, sections=sections)
    print(tables)
    if (path / "index.html").exists():
        print(printable(f"page {path / 'index.html'}"))
    return shown


def _measured(chosen: list[tuple[str, int]], task: Task, text: str, path: Path) -> Measured:
    found, results = {}, []
    for name, seed in chosen:
        file = results_file(path / f"{name}-{seed}", task, name, text)
        if file.exists():
            results.append(read_results(file).renamed(f"{name}, {text}", name))
            found.setdefault(name, {})[seed] = results[-1].series
    if results:
        check_comparable(results)
    return found


def _sections(
    task: Task, text: str, measured: Measured, output: Path, documents: list[str]
) -> list[Section]:
    """The means of all seeds, with their differences from the base, also by `documents` (that of
    every piece) if these are few; every seed."""
    title, kind = f"{task.title} ({text})", type(task)
    united: Series[Any] = {}
    for seeds in measured.values():
        for label in next(iter(seeds.values())):
            united[label] = [record for series in seeds.values() for record in series[label]]
    if not isinstance(task, DocumentTask):
        if any(len(seeds) > 1 for seeds in measured.values()):
            return [Section(f"{title}: every seed", _by_seed(measured, kind.numbers))]
        return [Section(title, kind.table(united), _pictures(kind, united, output))]
    assert issubclass(kind, DocumentTask)
    base, by_key = next(iter(measured)), operator.attrgetter(kind.key)
    shown = {x.removesuffix(f", {MEMORY_ON}"): y for x, y in united.items() if MEMORY_OFF not in x}
    pairs = {
        name: (_of_seeds(seeds, measured[base]), _of_seeds(measured[base], seeds))
        for name, seeds in measured.items()
        if name != base and seeds.keys() & measured[base].keys()
    }
    means = {
        label: means_over_seeds([series[label] for series in seeds.values()], by_key)
        for seeds in measured.values()
        for label in next(iter(seeds.values()))
    }
    table = _rows({label: (x, kind.shown(y)) for label, (x, y) in means.items()})
    found = [Section(f"{title}: {kind.value}", table, _pictures(kind, shown, output))]
    if pairs:
        curves = {x: means_over_seeds(y, kind.x, z) for x, (y, z) in pairs.items()}
        picture = (output / f"{kind.name}_from_{base}.png").absolute()
        names = f"{title} - {base}", kind.x_label, "nats per token"
        by_document.draw_curves(picture, *names, curves)
        sentence = f"Below 0 a recipe is better than {base} on the same tokens, mean of its seeds."
        table = {x: means_over_seeds(y, by_key, z) for x, (y, z) in pairs.items()}
        name = f"{title}: nats per token, less {base}"
        found.append(Section(name, _rows(table), [Picture(picture, sentence)]))
        measured_documents = {x.document for x in next(iter(united.values()))} - {None}
        is_all = len(measured_documents) == len(documents)  # else some piece was too short
        if is_all and len({*documents}) <= MOST_DOCUMENTS:

            def by_name(record: Any) -> str | None:
                return None if by_key(record) is None else documents[record.document]

            table = {x: means_over_seeds(y, by_name, z) for x, (y, z) in pairs.items()}
            found.append(Section(f"{name}, by document", _rows(table), ()))
    return [*found, Section(f"{title}: every seed, all tokens", _by_seed(measured, _all_tokens))]


def _headroom(task: Task, text: str, measured: Measured, full: str | None) -> list[Section]:
    """The share of the headroom that every recipe gives back, with the seeds of full attention."""
    base = next(iter(measured))
    if full is None or full not in measured or base == full:
        return []
    ceiling = measured[full]
    every = {x: y for x, y in measured.items() if ceiling.keys() <= y.keys()}
    shown = {x: [*itertools.chain(*_of_seeds(y, ceiling))] for x, y in every.items()}
    table = type(task).headroom(shown, base, full) if base in shown else []
    title = f"{task.title} ({text}): share of the headroom between {base} and {full}"
    return [Section(title, table, ())] if table else []


def _pictures(kind: type[Task], series: Series[Any], output: Path) -> list[Picture]:
    drawn = kind.pictures(output, series, None)
    return [x._replace(path=(output / x.path).absolute()) for x in drawn]


def _rows(curves: Curves) -> list[Row]:
    return [
        {"recipe": label} | {str(name): cell for name, cell in by_document.cells(*curve).items()}
        for label, curve in curves.items()
    ]


def _of_seeds(base: dict[int, Series[Any]], seeds: dict[int, Series[Any]]) -> list[Any]:
    """The records of the base by seed, of the same seeds as another recipe's."""
    (label,) = {label for series in base.values() for label in series if MEMORY_OFF not in label}
    return [base[seed][label] for seed in seeds if seed in base]


def _by_seed(measured: Measured, numbers: Callable[[Series[Any]], dict[str, float]]) -> list[Row]:
    """The `numbers` of every label by seed, their mean and standard deviation."""
    rows = []
    for seeds in measured.values():
        for label in next(iter(seeds.values())):
            found = {f"seed {x}": numbers({label: series[label]}) for x, series in seeds.items()}
            for name in dict.fromkeys(itertools.chain(*found.values())):
                values = {seed: given[name] for seed, given in found.items() if name in given}
                spread = statistics.stdev(values.values()) if len(values) > 1 else None
                mean = statistics.mean(values.values())
                rows.append({"recipe": name} | values | {"mean": mean, "deviation": spread})
    return rows


def _all_tokens(series: Series[Any]) -> dict[str, float]:
    """Nats per token over all records, by label."""
    curves, _ = by_document.means_of(series, lambda x: None if x.document is None else 0)
    return {name: float(x.mean[0]) for name, (_, x) in curves.items()}
