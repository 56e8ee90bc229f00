"""Evaluation tasks, each with its options, rows, records, table and picture, and their registry.

A new evaluation is one file in `ttcd_jax/tasks`: a NamedTuple, its record, and a subclass of `Task`
with `@register`. `ttcd evaluate`, training and the report iterate over `TASKS`.
"""

import abc
import hashlib
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np
from flax import nnx
from scipy.special import stdtrit
from ttcd_kernels.table import Row

from ttcd_jax.config import Bound, Config, Positive
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import UserError
from ttcd_jax.measure.journal import Journal
from ttcd_jax.measure.pictures import Picture, plot_bars, plot_lines
from ttcd_jax.measure.scorer import Scorer, Scores
from ttcd_jax.models.config import TransformerConfig, has_in_place_memory, switched_off
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.registry import Registry
from ttcd_jax.tokens import check_tokens
from ttcd_jax.train.state import with_params

type Series[Record] = dict[str, list[Record]]  # the records of every variant of a model, by label
type Differences = dict[Any, tuple[float, float, float]]  # by bucket: mean, low, high
type Arrays = dict[str, np.ndarray]  # [rows, ...]
MEMORY_ON, MEMORY_OFF = "fast weights on", "off (eta = 0)"  # the variants


class Subject(NamedTuple):
    """A model to evaluate, and its run."""

    model: Transformer
    tokenizer: Tokenizer | None  # None for synthetic data
    data: dict[str, Any]  # the run's data configuration, as in `config.json`
    run_dir: str | os.PathLike[str]
    label: str | None = None  # of the model in tables and pictures; None: its method's and changes
    changes: str = ""  # of the trained model's configuration, in words
    journal: Journal | None = None  # of answers, with lines of progress; None: neither

    @property
    def name(self) -> str:
        """The label of the model in tables and pictures."""
        return self.label or ", ".join(filter(None, (self.model.config.label, self.changes)))

    def variants(self) -> dict[str, Transformer]:
        """The model with its fast weights on and off (eta = 0), if that makes a difference."""
        off = switched_off(config := self.model.config, length=1)
        if off in (None, config) or not has_in_place_memory(config):
            return {self.name: self.model}
        params = nnx.to_pure_dict(nnx.state(self.model, nnx.Param))
        without = with_params(off, params)
        return {f"{self.name}, {MEMORY_ON}": self.model, f"{self.name}, {MEMORY_OFF}": without}


class Task[Rows, Record: tuple[Any, ...]](Config, abc.ABC):
    """An evaluation, which gives records of a model's answers to rows. Its fields are options;
    `batch_size`: rows, or prompts, read at once."""

    name: ClassVar[str]  # for the option --task and the folder of results
    title: ClassVar[str]  # of table and picture
    record: ClassVar[type[tuple[Any, ...]]]  # the NamedTuple of its records: texts, numbers, None
    key: ClassVar[str]  # the field of a record that names its bucket: the table's first column
    x_label: ClassVar[str]  # of `key`
    value: ClassVar[str] = "accuracy"  # the field of a record that is shown
    y_label: ClassVar[str] = ""  # of `value`; "": its name
    # Results of the same cases share a table where these options are equal; None: the buckets.
    shaping: ClassVar[tuple[str, ...] | None] = None
    is_lower_better: ClassVar[bool] = False
    # Of these columns, or of metrics with such a name, the other side is better.
    opposite: ClassVar[tuple[str, ...]] = ()
    sentence: ClassVar[str] = ""  # that says what the picture shows; "": the value by `x_label`
    rank: ClassVar[int] = 50  # on a page, the lowest first
    whole: ClassVar[str] = "all"  # the bucket of everything, where there is one: that of a verdict
    difference: ClassVar[str] = ""  # the unit of differences; "": that of the value
    interval: ClassVar[str] = "seeds"  # what that of a difference is over
    is_detail: ClassVar[bool] = False  # folded on a page
    is_by_batch: ClassVar[bool] = False  # whether records depend on `batch_size`
    has_variants: ClassVar[bool] = True  # with the memory on and off; else the model as it is

    batch_size: Annotated[int, Bound("in 1 .. 65,536", lambda rows: 0 < rows <= 2**16)] = 16

    @abc.abstractmethod
    def rows(self, subject: Subject) -> Rows:
        """The cases, independent of the parameters: a list, or a tuple or dict of arrays
        [rows, ...]. A pure function of options, run and tokenizer. Raises `UserError` for a run
        that this task cannot measure."""

    @abc.abstractmethod
    def measure(self, scorer: Scorer, rows: Rows, subject: Subject) -> Iterable[Record]:
        """The records of one variant of the model, of the finest grain that table and pictures
        need. All processes take part."""

    @classmethod
    def refusal(cls, config: TransformerConfig) -> str:
        """Why a model of this configuration cannot be measured; "": it can."""
        return ""

    def series(self, subject: Subject, rows: Rows) -> Series[Record]:
        """The records of every variant. Raises `UserError` for those of another kind."""
        found = {}
        variants = subject.variants() if self.has_variants else {subject.name: subject.model}
        for label, model in variants.items():
            records = [*(self.measure(self.scorer(subject, label, model), rows, subject) or ())]
            if not all(isinstance(x, self.record) for x in records):
                first, kind = records[0], self.record.__name__
                raise UserError(f"task {self.name} measures {first!r}: return a list of {kind}")
            found[label] = jax.tree.map(lambda x: x.item() if hasattr(x, "item") else x, records)
        return found

    def scorer(self, subject: Subject, label: str, model: Transformer) -> Scorer:
        """The scorer of a variant."""
        name = "" if subject.journal is None else f"{self.name}, {label}"
        options = {"batch_size": self.batch_size, "name": name, "journal": subject.journal}
        return Scorer(model, subject.tokenizer, **options)

    def measured_on(self, rows: Rows, subject: Subject) -> dict[str, str]:
        """The sha256 of the cases, by part: results share a table where common parts are equal."""
        return {"": digest(rows)}

    def facts(self, rows: Rows) -> dict[str, Any]:
        """What `results.json` says about the cases, JSON."""
        return {}

    def files(self, rows: Rows) -> dict[str, bytes]:
        """Files of the cases by name, for the folder of results."""
        return {}

    def chance(self, subject: Subject) -> float | None:
        """The value that guessing reaches, if it is known."""
        return None

    @classmethod
    def unit(cls, series: Series[Record]) -> tuple[str, str]:
        """(field of a record that is shown, its name on the axis)."""
        return cls.value, cls.y_label or cls.value

    @classmethod
    def columns(cls, series: Series[Record]) -> dict[str, dict[Any, Any]]:
        """The values by bucket of every column, by default one for a variant, from which table,
        numbers and bars are made."""
        value, _ = cls.unit(series)
        found = {x: {getattr(r, cls.key): getattr(r, value) for r in y} for x, y in series.items()}
        if any(len(found[name]) < len(series[name]) for name in series):
            raise UserError(f"task {cls.name} has several records of one {cls.key}: average them")
        return found

    @classmethod
    def table(cls, series: Series[Record]) -> list[Row]:
        """One row per bucket."""
        return table_of(cls.key, cls.columns(series))

    @classmethod
    def numbers(cls, series: Series[Record]) -> dict[str, float]:
        """The numbers by COLUMN/BUCKET: the metrics of an evaluation in training."""
        return {
            f"{name}/{bucket}": value
            for name, column in cls.columns(series).items()
            for bucket, value in column.items()
            if isinstance(value, int | float) and not math.isnan(value)
        }

    @classmethod
    def differences(
        cls, seeds: Sequence[Sequence[Record]], base: Sequence[Sequence[Record]]
    ) -> Differences:
        """By bucket, the value of `seeds` less that of the same seeds of a `base`, and the ends of
        its interval; NaN where that is unknown, as for one seed."""
        tables = [cls.numbers({"": [*records]}) for records in (*seeds, *base)]
        shared = [name for name in tables[0] if all(name in table for table in tables)]
        own, other = np.array([[x[y] for y in shared] for x in tables]).reshape(2, len(seeds), -1)
        means, half = (own - other).mean(axis=0), np.full(len(shared), math.nan)
        if len(seeds) > 1:
            spread = (own - other).std(axis=0, ddof=1) / math.sqrt(len(seeds))
            half = spread * stdtrit(len(seeds) - 1, 0.975)
        ends = zip(means.tolist(), (means - half).tolist(), (means + half).tolist(), strict=True)
        return dict(zip((x.removeprefix("/") for x in shared), ends, strict=True))

    @classmethod
    def prefers_less(cls, name: str) -> bool:
        """Whether the lower is the better of a metric or bucket with this name."""
        return cls.is_lower_better != bool({*re.split("[/, ]", name)} & {*cls.opposite})

    @classmethod
    def curves(cls, series: Series[Record]) -> dict[str, tuple[list[Any], list[Any]]] | None:
        """(x, y) of every series for a picture of lines; None: bars of the columns."""

    @classmethod
    def pictures(cls, folder: Path, series: Series[Record], chance: float | None) -> list[Picture]:
        """Draws the pictures of the task into `folder`, the most telling first."""
        path, label = folder / f"{cls.name}.svg", cls.unit(series)[1]
        labels = {"title": cls.title, "x_label": cls.x_label, "y_label": label, "chance": chance}
        if (curves := cls.curves(series)) is not None:
            plot_lines(path, series=curves, **labels)
        else:
            plot_bars(path, series=cls.columns(series), **labels)
        names = [f"{x}/{y}" for x, column in cls.columns(series).items() for y in column]
        sides = {"lower" if cls.prefers_less(x) else "higher" for x in names}
        better = f": {sides.pop()} is better" if len(sides) == 1 else ""
        sentence = f"{label[:1].upper()}{label[1:]} by {cls.x_label}{better}."
        return [Picture(Path(path.name), cls.sentence or sentence)]

    @classmethod
    def headroom(cls, seeds: Sequence[Series[Record]], control: str, ceiling: str) -> list[Row]:
        """Of losses: the share that every other series gives back of what lies between two, by all
        `seeds`."""
        return []

    @classmethod
    def comparable(cls, options: dict[str, Any], table: list[Row]) -> Any:
        """Results of the same cases share a table where this is equal; `options` are JSON."""
        if cls.shaping is None:
            return [row[cls.key] for row in table]
        return [options.get(name) for name in cls.shaping]


class RowTask[Record: tuple[Any, ...]](Task[Arrays, Record]):
    """A task that measures the losses of at most `max_rows` rows [T], spread evenly over a
    source."""

    max_rows: Positive = 512

    @abc.abstractmethod
    def source(self, subject: Subject) -> Any:
        """Random access to rows of a document each, with the fields of `ttcd_jax.data.packing`."""

    def rows(self, subject: Subject) -> Arrays:
        source = self.source(subject)
        chosen = np.linspace(0, len(source) - 1, min(self.max_rows, len(source))).astype(int)
        examples = [source[int(index)] for index in chosen]
        rows = {name: np.stack([row[name] for row in examples]) for name in examples[0]}
        check_tokens(rows["targets"], subject.model.config.vocab_size)
        return rows

    def measured_on(self, rows: Arrays, subject: Subject) -> dict[str, str]:
        """Of text its characters, so that runs of other tokenizers compare."""
        if subject.tokenizer is None:
            return super().measured_on(rows, subject)
        return {"": digest(subject.tokenizer.decode(rows["targets"][rows["loss_mask"]]))}


def table_of(key: str, columns: dict[str, dict[Any, Any]]) -> list[Row]:
    """The rows of a table from its columns, cells by bucket; None for a bucket that one has not."""
    buckets = dict.fromkeys(bucket for column in columns.values() for bucket in column)
    return [{key: x} | {name: column.get(x) for name, column in columns.items()} for x in buckets]


def digest(cases: Any) -> str:
    """The sha256 of texts, numbers and arrays, in any nesting."""
    result = hashlib.sha256()
    for leaf in jax.tree.leaves(cases):
        is_array = isinstance(leaf, np.ndarray)
        content = leaf.tobytes() if is_array else str(leaf).encode(errors="surrogatepass")
        header = (leaf.dtype, leaf.shape) if is_array else str
        result.update(f"{header}, {len(content)}:".encode() + content)
    return result.hexdigest()


def row_scores(scorer: Scorer, rows: Arrays) -> Scores:
    """The scores [rows, T] of the targets of `rows`, a document each; 0 for padding (segment 0)."""
    is_token = rows.get("segment_ids", np.ones_like(rows["tokens"])) > 0
    ids = np.concatenate([rows["tokens"], rows["targets"][:, -1:]], axis=1)
    sizes = is_token.sum(axis=1)
    cut = [row[: size + 1] for row, size in zip(ids, sizes, strict=True)]
    found = scorer.losses(cut, [x[:size] for x, size in zip(rows["targets"], sizes, strict=True)])
    scores = Scores(*(np.zeros(is_token.shape, field.dtype) for field in found[0]))
    for whole, values in zip(scores, zip(*found, strict=True), strict=True):
        whole[is_token] = np.concatenate(values)
    return scores


TASKS = Registry[type[Task]]("evaluation task", lambda task: task, Task)
find_task, register = TASKS.named, TASKS.add
