"""The runs of a study, their training, in a process each, and their evaluations; its tables, its
page, and the records of which `experiments.pages` draws tables."""

import fnmatch
import functools
import itertools
import json
import math
import operator
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from absl import logging
from ttcd_kernels.table import Row, format_table

from ttcd_jax.commands import cli
from ttcd_jax.config import DISTINCT, Bound, Config, NonNegative, Positive
from ttcd_jax.data.corpus import load_documents
from ttcd_jax.data.documents import Document
from ttcd_jax.data.sources import MixtureConfig, TextConfig
from ttcd_jax.data.synthetic import SyntheticConfig
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import read_json, write_json, write_whole
from ttcd_jax.measure import by_document, results
from ttcd_jax.measure.answers import Measured, answers
from ttcd_jax.measure.by_document import Bucket, Curves, DocumentTask, cells, means_over_seeds
from ttcd_jax.measure.page import Section, write_page
from ttcd_jax.measure.pictures import Picture, coloured_by_run
from ttcd_jax.measure.results import check_comparable, evaluate, headroom_sections, read_results
from ttcd_jax.measure.task import MEMORY_OFF, MEMORY_ON, Series, Subject, Task, digest
from ttcd_jax.methods.registry import METHODS
from ttcd_jax.models.config import (
    has_in_place_memory,
    layers_with_teacher,
    switched_off,
    training_flops_per_token,
)
from ttcd_jax.registry import IMPORTED_MODULES
from ttcd_jax.run import page
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.build import untrained
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import METRICS, RunDirectory, load_run
from ttcd_jax.run.page import Run
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.run.start import inherited_model
from ttcd_jax.train.checkpoint import complete_steps
from ttcd_jax.train.layers_on_disk import stored_params
from ttcd_jax.units import printable

# A .gin file, or (name, file, bindings ...).
Variant = str | Annotated[tuple[str, ...], Bound("a name and a file", lambda x: len(x) > 1)]
START = "start"
type BySeed = dict[str, dict[int, Series[Any]]]  # by recipe and seed
# By the name of a corpus the folder of its pieces, and the document of each; None: drawn.
type Texts = dict[str, tuple[Path, list[str]] | None]
MOST_DOCUMENTS = 16  # that a table shows one by one
_WIDEST = 2**20  # tokens: beyond the rows that full attention is evaluated on
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
    is_once: bool = False


def _parts(variant: Variant) -> tuple[str, str, tuple[str, ...]]:
    """Name, file and bindings."""
    if isinstance(variant, str):
        return PurePath(variant).stem, variant, ()
    name, file, *bindings = variant
    return name, file, (*bindings,)


def control(name: Control, run: RunConfig) -> tuple[str, ...]:
    """The bindings that make a control of a run; none for a run without such a part."""
    model, length = run.model, run.data.seq_len
    if not has_in_place_memory(model) or (name == "no_gap" and not layers_with_teacher(model)):
        return ()
    seen = model.stream_window
    plain = {"method": "swa" if seen else "full", "memory": None, "fast_layers": (), "window": seen}
    fields, others = plain, ()
    match name:
        case "no_gap":
            fields = model.without_gap(max(length, _WIDEST))
        case "eta0":
            fields, others = {}, (f"{type(model.settings).__name__}.eta=0.0",)
        case "gated_delta":
            fields, others = {"window": seen}, _GATED_DELTA
        case "swa_flops":
            models = model, model.replace(**plain)
            cost, least = (training_flops_per_token(x, length) for x in models)
            others = (f"RunConfig.steps={round(run.steps * cost / least)}",)
            if (steps := run.optimizer.schedule.steps) is not None:
                others += (f"ScheduleConfig.steps={round(steps * cost / least)}",)
    if name in ("swa", "swa_flops", "gated_delta"):  # without what names a memory's parameters
        names = stored_params(model.replace(**plain))
        rates = tuple(x for x in run.optimizer.rates if fnmatch.filter(names, x[0]))
        others += (f"OptimizerConfig.rates={rates!r}",) * (rates != run.optimizer.rates)
        others += ("RunConfig.memory_warmup=0",) * (run.memory_warmup > 0)
    return (*others, *(f"TransformerConfig.{field}={x!r}" for field, x in fields.items()))


class StudyConfig(Config):
    """`recipes`: .gin files of runs that differ in their method alone, or (NAME, FILE, BINDING,
    ...), the first of which is the base of all differences; each is trained with all `seeds`, those
    of `once` with the first. All go on from the run `start` of their seed, (FILE, BINDING, ...), if
    there is one, which is not evaluated.

    `controls` of every recipe with an in-place memory are trained beside it, RECIPE_CONTROL, equal
    runs once: "no_gap", the student's window is the teacher's; "eta0", nothing is written, so that
    the convolutions are left; "swa", neither; "swa_flops", the same for as many steps as cost the
    recipe's FLOPs; "gated_delta", after window attention the gated delta rule, whose keys start as
    the queries of the token before.

    All are evaluated by `evaluations` on the held-out text of every corpus they are trained on, cut
    into pieces of `piece_bytes` and whole characters, at most `max_pieces` of them, taken evenly;
    where they are trained on rows that are drawn, on other such rows. A recipe that a task cannot
    measure is left out of it, if not all are.
    """

    recipes: Annotated[tuple[Variant, ...], DISTINCT]
    once: tuple[Variant, ...] = ()
    start: tuple[str, ...] = ()
    controls: tuple[Control, ...] = ()
    seeds: Annotated[tuple[NonNegative, ...], DISTINCT] = (0, 1, 2)
    evaluations: tuple[Task, ...] = ()
    piece_bytes: Positive = 4096
    max_pieces: Positive = 16

    def validate(self) -> None:
        recipes = [START, *(_parts(x)[0] for x in (*self.recipes, *self.once))]
        tasks = [task.name for task in self.evaluations]
        for kind, names in (("recipes", recipes), ("evaluations", tasks)):
            if len({*names}) < len(names):
                text = f"two {kind} of the study have one name"
                raise UserError(f"{text}: {', '.join(names)}; rename one, or leave it out")

    @property
    def _variants(self) -> tuple[Variant, ...]:
        return (*self.recipes, *self.once, *([(START, *self.start)] if self.start else ()))

    def runs(self, params: Sequence[str] = ()) -> dict[str, Recipe]:
        """Every recipe under the bindings `params`, its controls after it, by name."""
        options = {"config_dir": cli.CONFIG_DIR, "inherit": inherited_model()}
        load = functools.partial(load_config, RunConfig, **options)
        found = {}
        for variant in self._variants:
            name, file, own = _parts(variant)
            own = (*own, *params)
            found[name] = Recipe(load(file, own), file, own, variant in self.once)
        result: dict[str, Recipe] = {}
        for name, recipe in found.items():
            result.setdefault(name, recipe)
            for kind in self.controls if name != START else ():
                bindings = (*recipe.bindings, *control(kind, recipe.config))
                label = f"{name}_{kind}"
                config, both = load(recipe.file, bindings), found | result
                if same := next((x for x in both if both[x].config == config), None):
                    is_once = both[same].is_once and recipe.is_once
                    result[same] = both[same]._replace(is_once=is_once)
                    continue
                if label in found:
                    raise UserError(f"{found[label].file} is not the control {kind}: rename it")
                result[label] = recipe._replace(config=config, bindings=bindings)
        return result

    def chosen(self, runs: dict[str, Recipe], only: Sequence[str] = ()) -> list[tuple[str, int]]:
        """(recipe, seed) of all runs, or of the recipes `only` and the start; first seeds first."""
        for name in only:
            if name not in runs:
                raise UserError(f"--only={name} is not one of the study's {', '.join(runs)}")
        return [
            (name, seed)
            for seed in self.seeds
            for name, recipe in runs.items()
            if (not only or name in (*only, START))
            and (not recipe.is_once or seed == self.seeds[0])
        ]


def results_file(folder: Path, task: Task, name: str, text: str) -> Path:
    """The results of a task on a text in a run directory."""
    return folder / "eval" / results.folder_name(task.name, f"{name}, {text}") / results.FILE


def held_out_texts(config: StudyConfig, runs: dict[str, Recipe], path: Path) -> Texts:
    """Writes the pieces of the held-out text of every corpus into a folder of their own, whose name
    has their digest, so that results on other pieces are made again.

    Raises `UserError` for recipes on other data (drawn rows may have other sizes), for data that is
    neither text nor drawn, for a task that reads no text or can measure no recipe, for two corpora
    of one name, and for held-out text that is too short.
    """
    for task in config.evaluations:
        if all(refusals := [task.refusal(x.config.model) for x in runs.values()]):
            raise UserError(f"task {task.name}: {refusals[0]}")
    data, texts, size = next(iter(runs.values())).config.data, {}, config.piece_bytes
    if isinstance(data, SyntheticConfig) and all(
        type(x.config.data) is type(data) for x in runs.values()
    ):
        return {data.kind: None}  # rows of each recipe's own sizes
    if others := [x.file for x in runs.values() if x.config.data != data]:
        raise UserError(f"the recipes of a study have one data configuration, {others[0]} another")
    if without := [task.name for task in config.evaluations if not hasattr(task, "text")]:
        text = f"task {without[0]} has no option text"
        raise UserError(f"{text}: leave it out of the StudyConfig.evaluations of recipes on text")
    write_json(path / "study.json", config.to_dict())  # so that its texts are no run's documents
    for part in data.parts if isinstance(data, MixtureConfig) else (data,):
        if not isinstance(part, TextConfig):
            raise UserError(f"a study is evaluated on text, not on {type(part).__name__}")
        name = "stdlib" if part.corpus.path is None else Path(part.corpus.path).name
        pieces = [
            (document.name, _text(document, start, size))
            for document in load_documents(part.corpus, "validation")
            for start in range(0, len(document.text) - size + 1, size)
        ]
        if not pieces:
            remedy = "lower StudyConfig.piece_bytes"
            raise UserError(f"no held-out document of {name} has {size} bytes: {remedy}")
        if name in texts:
            raise UserError(f"two corpora of the study are named {name}: rename one of the folders")
        chosen = np.linspace(0, len(pieces) - 1, min(config.max_pieces, len(pieces))).astype(int)
        documents, cut = zip(*(pieces[index] for index in chosen), strict=True)
        folder = path / "texts" / f"{name}-{digest([*cut])[:12]}"
        for number, text in enumerate(cut):
            write_whole(folder / f"{number:03}.txt", text)
        texts[name] = folder, [*documents]
    return texts


def _text(document: Document, start: int, size: int) -> str:
    """A piece of a document, of `size` bytes or so many more as its last character needs."""

    def whole(index: int) -> int:  # the first index from here on at which a character begins
        while index < len(document.text) and document.text[index] & 0xC0 == 0x80:
            index += 1
        return index

    start = whole(start)
    try:
        return document.text[start : whole(start + size)].decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.name} is not UTF-8, as the texts of a study are: convert it"
        ) from error


def compute(
    config: StudyConfig, name: str, seed: int, recipe: Recipe, texts: Texts, path: Path
) -> None:
    """Trains and evaluates what is missing of a run. Raises `UserError` where training failed, and
    for a run of another configuration."""
    folder, evaluations = path / f"{name}-{seed}", config.evaluations
    fields: dict[str, Any] = {"seed": seed}
    if config.start and name == START:
        evaluations = ()
    elif config.start:
        fields["start_from"] = str(path / f"{START}-{seed}")
    params = (*recipe.bindings, *(f"RunConfig.{field}={x!r}" for field, x in fields.items()))
    if (directory := RunDirectory(folder)).is_claimed:
        directory.accepted_changes(recipe.config.replace(**fields).to_dict(), None)
    missing, model = [], recipe.config.model
    for task, text in itertools.product((x for x in evaluations if not x.refusal(model)), texts):
        if pieces := texts[text]:
            task = _of_all(task.replace(text=str(pieces[0])), len(pieces[1]))
        file = results_file(folder, task, name, text)
        if not file.exists() or read_json(file).get("options") != task.to_dict():
            missing.append((task, text))
    is_trained = recipe.config.steps in complete_steps(folder / "checkpoints")
    if (is_trained or evaluations) and not missing:
        return
    if not is_trained:  # so that what a model cannot be asked is refused before
        for task, _ in missing:
            task.rows(untrained(recipe.config, folder))
    logging.info("study: %s, seed %d", name, seed)
    command = [sys.executable, "-m", "ttcd_jax.commands.launch", f"--gin={recipe.file}"]
    command += [f"--param={text}" for text in params]
    command += [f"--import={name}" for name in IMPORTED_MODULES]
    if status := subprocess.run([*command, f"--run_dir={folder}"], check=False).returncode:
        raise UserError(f"{folder.name} stopped with status {status}: {shlex.join(command)}")
    trained, data = load_run(folder), directory.read_part("data")
    for task, text in missing:
        subject = Subject(trained.model, trained.tokenizer, data, folder, f"{name}, {text}")
        evaluate(task, subject, trained.step).write()


def _of_all(task: Task, num_pieces: int) -> Task:
    """The task on all pieces, though its default be fewer."""
    most = getattr(task, "max_rows", num_pieces)
    return task.replace(max_rows=num_pieces) if most < num_pieces else task


def write_study(
    config: StudyConfig, recipes: dict[str, Recipe], texts: Texts, path: Path
) -> list[Section]:
    """Prints the tables of all runs that were evaluated, and writes them with pictures into
    `index.html`, and alone into `tables.txt`; returns them."""
    chosen, sections = config.chosen(recipes), []
    folders = {f"{name}, seed {seed}": path / f"{name}-{seed}" for name, seed in chosen}
    runs = [Run(name, x) for name, x in folders.items() if read_metrics(x / METRICS)]
    labels = {name: recipe.config.model.label for name, recipe in recipes.items()}
    everything = []
    with coloured_by_run(labels) as colours:
        for (text, pieces), task in itertools.product(texts.items(), config.evaluations):
            if measured := _measured(chosen, task, text, path, is_drawn=pieces is None):
                title, documents = f"{task.title} ({text})", pieces[1] if pieces else []
                if isinstance(task, DocumentTask) and pieces:
                    measured, documents = _united(measured, documents)
                everything.append(Measured(type(task), title, measured))
                sections += _sections(task, title, measured, path / "pictures" / text, documents)
                sections += _headroom(task, title, measured, recipes)
        sections += page.training_sections(runs, path / "pictures")
    colours |= {run.label: colours[run.label.rpartition(", ")[0]] for run in runs}
    firsts = {run.label.rpartition(", ")[0]: run for run in reversed(runs)}
    known = {x: firsts[x].facts for x in recipes if x in firsts and x != START}
    shown = [Section("Runs", [run.row for run in runs]), *sections]
    tables = "\n".join(f"{x.title}\n{format_table(x.table)}\n" for x in shown)
    write_whole(path / "tables.txt", tables)
    file, title = path / "index.html", f"Study: {', '.join(recipes)}"
    sections += [page.settings_section([*firsts.values()])] if runs else []
    found = {"answers": answers(everything, known), "runs": page.first_columns(runs)}
    write_page(file, title=title, sections=sections, colours=colours, **found)
    print(tables)
    if file.exists():
        print(printable(f"page {file}"))
    return shown


def _measured(
    chosen: list[tuple[str, int]], task: Task, text: str, path: Path, is_drawn: bool = False
) -> BySeed:
    """The series of every run that was evaluated. Rows that are drawn may have other sizes in every
    recipe, so that a table has the buckets of all."""
    found, measured = [], {}
    for name, seed in chosen:
        file = results_file(path / f"{name}-{seed}", task, name, text)
        if file.exists():
            found.append(read_results(file).renamed(f"{name}, {text}", name))
            measured.setdefault(name, {})[seed] = found[-1].series
    for name, seeds in measured.items():
        if len({frozenset(series) for series in seeds.values()}) > 1:
            raise UserError(
                f"the seeds of {name} were evaluated by versions that name their results "
                f"differently ({'; '.join(', '.join(x) for x in seeds.values())}): remove eval/ "
                f"from {', '.join(f'{name}-{seed}' for seed in seeds)}, and the same command "
                "evaluates them again"
            )
    if found and not is_drawn:
        check_comparable(found)
    return measured


def _united(measured: BySeed, pieces: list[str]) -> tuple[BySeed, list[str]]:
    """The records by document instead of by piece, and the name of each by its number; of too few
    documents for an interval, and where a piece was too short, the pieces stay."""
    names = [*dict.fromkeys(pieces)]
    everything = [x for seeds in measured.values() for x in seeds.values()]
    documents = {x.document for y in everything for records in y.values() for x in records}
    if missing := len(pieces) - len(documents - {None}):
        logging.warning("%d of %d pieces have too few tokens: not measured", missing, len(pieces))
    if len(names) < by_document.LEAST_DOCUMENTS or len(pieces) != len(documents - {None}):
        return measured, pieces
    number = {None: None} | {i: names.index(name) for i, name in enumerate(pieces)}

    def renumbered(records: Sequence[Any]) -> list[Any]:
        return [x._replace(document=number[x.document]) for x in records]

    return {
        name: {seed: {label: renumbered(x) for label, x in y.items()} for seed, y in seeds.items()}
        for name, seeds in measured.items()
    }, names


def _sections(
    task: Task, title: str, measured: BySeed, output: Path, documents: list[str]
) -> list[Section]:
    """The means of all seeds, with their differences from the base, also by `documents` (their
    names by number) if these are few; every seed."""
    kind = type(task)
    by_label = {
        label: [series[label] for series in seeds.values()]
        for seeds in measured.values()
        for label in next(iter(seeds.values()))
    }
    united: Series[Any] = {x: [*itertools.chain(*seeds)] for x, seeds in by_label.items()}
    if not isinstance(task, DocumentTask):
        if any(len(seeds) > 1 for seeds in measured.values()):
            return [Section(f"{title}: every seed", _by_seed(measured, kind.numbers))]
        return [Section(title, kind.table(united), _pictures(kind, united, output))]
    assert issubclass(kind, DocumentTask)
    base, by_key = next(iter(measured)), operator.attrgetter(kind.key)
    shown = {x.removesuffix(f", {MEMORY_ON}"): y for x, y in united.items() if MEMORY_OFF not in x}
    means = _rows({x: means_over_seeds(y, by_key) for x, y in by_label.items()}, kind.cells)
    found = [Section(f"{title}: {kind.value}", means, _pictures(kind, shown, output))]
    if inside := {x: curve for x, y in by_label.items() if (curve := kind.within(y))}:
        return [*found, Section(f"{title}: {kind.value}, less as trained", _rows(inside, cells))]
    every = Section(f"{title}: every seed, all tokens", _by_seed(measured, _all_tokens))
    every = every._replace(is_detail=True)
    pairs = {
        name: (_of_seeds(seeds, measured[base]), _of_seeds(measured[base], seeds))
        for name, seeds in measured.items()
        if name != base and seeds.keys() & measured[base].keys()
    }
    if not pairs:
        return [*found, every]

    def less_base(bucket: Bucket) -> Curves:
        return {name: means_over_seeds(x, bucket, y) for name, (x, y) in pairs.items()}

    def by_name(record: Any) -> str | None:
        return None if by_key(record) is None else documents[record.document]

    picture = (output / f"{kind.name}_from_{base}.svg").absolute()
    labels = f"{title}, less {base}", kind.x_label, "nats per token, below 0 is better"
    by_document.draw_curves(picture, *labels, less_base(kind.x))
    sentence = f"Below 0 a recipe is better than {base} on the same tokens, mean of its seeds."
    both = (_rows(less_base(bucket), cells) for bucket in (by_key, _every_token))
    table = [row | every for row, every in zip(*both, strict=True)]
    name = f"{title}: nats per token, less {base}"
    found.append(Section(name, table, [Picture(picture, sentence)]))
    numbers = {x.document for x in next(iter(united.values()))} - {None}
    # Fewer numbers than documents: some piece was too short.
    if len(numbers) == len(documents) and len({*documents}) <= MOST_DOCUMENTS:
        table = _rows(less_base(by_name), cells)
        found.append(Section(f"{name}, by document", table, is_detail=True))
    return [*found, every]


def _headroom(
    task: Task, title: str, measured: BySeed, recipes: dict[str, Recipe]
) -> list[Section]:
    """The share of the headroom that every recipe gives back, by the seeds that it shares with the
    base and the one that writes no memory and sees the most."""
    base, models = next(iter(measured)), {x: recipes[x].config.model for x in measured}
    silent = (
        name
        for name, model in models.items()
        if METHODS[model.method].layers == "none" or switched_off(model, length=1) == model
    )
    full = max((base, *silent), key=lambda name: models[name].stream_window or math.inf)
    found: list[Section] = []
    for name in measured if full != base else ():
        shared = measured[name].keys() & measured[base].keys() & measured[full].keys()
        three = {x: _of_seeds(measured[x], sorted(shared)) for x in (name, base, full)}
        seeds = [dict(zip(three, x, strict=True)) for x in zip(*three.values(), strict=True)]
        if seeds and name not in (base, full):
            found += headroom_sections(type(task), title, seeds, (base, full))
    rows = zip(*(section.table for section in found), strict=True)
    table = [functools.reduce(operator.or_, row) for row in rows]
    return [found[0]._replace(table=table)] if found else []


def _pictures(kind: type[Task], series: Series[Any], output: Path) -> list[Picture]:
    drawn = kind.pictures(output, series, None)
    return [x._replace(path=(output / x.path).absolute()) for x in drawn]


def _rows(curves: Curves, cells: Callable[..., dict[Any, str | None]]) -> list[Row]:
    return [
        {"recipe": label} | {str(name): cell for name, cell in cells(*curve).items()}
        for label, curve in curves.items()
    ]


def _of_seeds(base: dict[int, Series[Any]], seeds: Iterable[int]) -> list[Any]:
    """The records of the base by seed, of the same seeds as another recipe's."""
    (label,) = {label for series in base.values() for label in series if MEMORY_OFF not in label}
    return [base[seed][label] for seed in seeds if seed in base]


def _by_seed(measured: BySeed, numbers: Callable[[Series[Any]], dict[str, float]]) -> list[Row]:
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


def _every_token(record: Any) -> str | None:
    return None if record.document is None else "all"


def _all_tokens(series: Series[Any]) -> dict[str, float]:
    """Nats per token over all records, by label."""
    curves, _ = by_document.means_of(series, _every_token)
    return {name: float(x.mean[0]) for name, (_, x) in curves.items()}


def write_records(
    config: StudyConfig,
    recipes: dict[str, Recipe],
    sections: Sequence[Section],
    path: Path,
    file: str | Path,
    command: str,
) -> None:
    """Writes a line of JSON with what holds for all others, of every recipe its file, the digest of
    its configuration without seed and start, and its bindings; then the rows of the `sections`."""
    trained, folders = {}, []
    for name, seed in config.chosen(recipes):
        if (run := RunDirectory(path / f"{name}-{seed}")).is_claimed:
            found = run.read_config() | dict.fromkeys(("seed", "start_from", "sha256"))
            short = digest(json.dumps(found, sort_keys=True))[:12]
            trained[name] = recipes[name].file, short, *recipes[name].bindings
            folders.append(run.path)
    over = "seeds and documents" if len(config.seeds) > 1 else "documents"
    interval = f"{over} (of fewer than five: pieces of {config.piece_bytes:,} bytes), in pairs"
    facts = {"seeds": config.seeds, "recipes": trained, "interval": interval}
    page.write_records(file, sections, folders, command, **facts)
