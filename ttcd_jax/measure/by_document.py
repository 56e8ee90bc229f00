"""Evaluations of losses that are summed by document: their choice, intervals and differences."""

import abc
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from scipy.special import stdtrit
from ttcd_kernels.table import Row

from ttcd_jax.data.sources import text_records
from ttcd_jax.errors import UserError
from ttcd_jax.measure.pictures import Picture, plot_lines
from ttcd_jax.measure.selection import Selection, plain_documents, read_manifest
from ttcd_jax.measure.task import MEMORY_OFF, MEMORY_ON, Series, Subject, Task
from ttcd_jax.tokens import check_tokens

_COVERAGE = 0.95
_LEAST_DOCUMENTS = 5  # with an interval


class Means(NamedTuple):
    """Means [K] and the ends of their intervals [K]; NaN where they are unknown."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def means_over_documents(sums: np.ndarray, counts: np.ndarray) -> Means:
    """The means per token of K quantities, from their `sums` over the tokens of each document and
    the `counts` of these tokens, both [documents, K].

    A mean is the ratio of the two totals, its variance that of a ratio estimator (Cochran, Sampling
    Techniques, 1977, 6.3), and its interval Student's t with one degree of freedom less than
    documents with tokens, which holds for few documents too. It is unknown with fewer than five,
    whose losses say too little of others. For a difference of two models, give the differences of
    their sums: the interval is that of pairs.
    """
    documents = (counts > 0).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = sums.sum(axis=0) / counts.sum(axis=0)
        variance = ((sums - mean * counts) ** 2).sum(axis=0) * documents / (documents - 1)
        half = stdtrit(documents - 1, (1 + _COVERAGE) / 2) * np.sqrt(variance) / counts.sum(axis=0)
    half = np.where(documents >= _LEAST_DOCUMENTS, half, np.nan)
    return Means(mean, mean - half, mean + half)


_DIFFERENCE = "Fast weights on minus off, on the same tokens: below 0 they help."
_BAND = "Bands: 95 % intervals over documents; lower is better."


class DocumentRecord(Protocol):
    """The losses of some tokens of a document: their number, and the sum in nats."""

    @property
    def document(self) -> int | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def nll(self) -> float: ...


type Bucket = Callable[[Any], Any]  # of a record; None: it is left out
type Curves = dict[str, tuple[list[Any], Means]]  # by label: the buckets, and their means


def means_of[R: DocumentRecord](series: Series[R], bucket: Bucket) -> tuple[Curves, Curves]:
    """Nats per token of the records of every series by `bucket`, and by run those of its variant
    with the memory on minus off, in pairs."""
    means, pairs = {}, {}
    for label, records in series.items():
        names, nll, tokens = _sums(records, bucket)
        means[label] = names, means_over_documents(nll, tokens)
        run = label.removesuffix(f", {MEMORY_ON}")
        if run != label and (off := series.get(f"{run}, {MEMORY_OFF}")):
            pairs[run] = differences(records, off, bucket)
    return means, pairs


def differences(
    records: Sequence[DocumentRecord], base: Sequence[DocumentRecord], bucket: Bucket
) -> tuple[list[Any], Means]:
    """The buckets, and nats per token of `records` less those of `base`, in pairs. Raises
    `UserError` for records of other tokens or buckets."""
    (names, nll, tokens), (base_names, base_nll, base_tokens) = (
        _sums(x, bucket) for x in (records, base)
    )
    if names != base_names or not np.array_equal(tokens, base_tokens):
        raise UserError(
            "two models were evaluated on other tokens or in other buckets: evaluate both with the "
            "same options (of recurrence, window and reach too)"
        )
    return names, means_over_documents(nll - base_nll, tokens)


def cells(names: list[Any], means: Means, *, has_ends: bool = False) -> dict[Any, str | None]:
    """The means by name with half of their intervals, "2.345 ± 0.012", or with their ends, "9.310
    (8.204 to 10.633)"; None for an unknown mean."""
    result: dict[Any, str | None] = dict.fromkeys(names)
    for name, mean, low, high in zip(names, *means, strict=True):
        form = ",.3f" if abs(mean) < 1e6 else ".3e"
        interval = f" ± {(high - low) / 2:{form}}"
        if math.isnan(high - low):
            interval = " (no interval)"
        elif has_ends:
            interval = f" ({low:{form}} to {high:{form}})"
        result[name] = None if math.isnan(mean) else f"{mean:{form}}{interval}"
    return result


def _sums(
    records: Sequence[DocumentRecord], bucket: Bucket
) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """(buckets, sums of losses [documents, buckets], numbers of tokens)."""
    kept = [(name, record) for record in records if (name := bucket(record)) is not None]
    names = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in kept))}
    documents = {record.document for _, record in kept if record.tokens} or {None}
    numbers = {name: i for i, name in enumerate(sorted(documents, key=lambda x: x or 0))}
    nll, tokens = np.zeros((2, len(numbers), len(names)))
    for name, record in kept:
        if record.tokens:
            index = numbers[record.document], names[name]
            nll[index] += record.nll
            tokens[index] += record.tokens
    return [*names], nll, tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentTask[Record: DocumentRecord](Task[Selection, Any]):
    """Losses on documents without special tokens: those of `text`, a file or folder; None: the
    run's held-out text. `manifest`: exactly those of another evaluation, its documents.npz, to
    which the options that choose documents do not apply.
    """

    value = "nats per token"  # or perplexity
    is_lower_better = True
    sentence: ClassVar[str]  # that says what the picture shows
    shaping: ClassVar[tuple[str, ...]] = ()  # options that define buckets

    text: str | None = None
    manifest: str | None = None

    def validate(self) -> None:
        if self.text is not None and self.manifest is not None:
            raise UserError(
                f"text {self.text} and manifest {self.manifest} both name documents: give one"
            )

    @abc.abstractmethod
    def choose(self, documents: Iterator[np.ndarray], subject: Subject) -> Selection:
        """`select` from documents [T]."""

    def rows(self, subject: Subject) -> Selection:
        tokenizer = subject.tokenizer
        digest = "" if tokenizer is None else tokenizer.digest
        if self.manifest is not None:
            chosen = read_manifest(Path(self.manifest), digest)
        else:
            records = text_records(subject.run_dir, subject.data, tokenizer, self.text)
            assert tokenizer is not None, "text_records refuses a run without one"
            chosen = self.choose(plain_documents(records, tokenizer), subject)
            num_files = sum(part.num_files or len(part.shards) for part in records)
            stats = {"mode": "single_document", "num_files": num_files} | chosen.stats
            chosen = dataclasses.replace(chosen, stats=stats, tokenizer=digest)
        for ids in chosen.documents:
            check_tokens(ids, subject.model.config.vocab_size)
        return chosen

    def facts(self, rows: Selection) -> dict[str, Any]:
        return {"document_stats": rows.stats}

    def measured_on(self, rows: Selection, subject: Subject) -> dict[str, str]:
        return {"": rows.digest}

    def files(self, rows: Selection) -> dict[str, bytes]:
        return {"documents.npz": rows.manifest()}

    @classmethod
    def comparable(cls, options: dict[str, Any], table: list[Row]) -> Any:
        return [options.get(name) for name in cls.shaping]

    @classmethod
    def shown(cls, means: Means) -> Means:
        """The value of means in tables and pictures."""
        return Means(*np.exp(np.minimum(means, 700))) if cls.value == "perplexity" else means

    @classmethod
    def table(cls, series: Series[Record]) -> list[Row]:
        """A row per bucket: every series and every difference, with their intervals."""
        means, pairs = means_of(series, operator.attrgetter(cls.key))
        columns: Curves = {}
        for label, (names, x) in means.items():
            columns[label] = names, cls.shown(x)
            if pair := pairs.get(run := label.removesuffix(f", {MEMORY_OFF}")):
                columns[f"{run}, on - off (nats)"] = pair
        rows: dict[Any, dict[str, Any]] = {}
        for label, curve in columns.items():
            has_ends = cls.value == "perplexity" and label in means  # those of nats, exponentiated
            for name, cell in cells(*curve, has_ends=has_ends).items():
                rows.setdefault(name, {cls.key: name})[label] = cell
        return [*rows.values()]

    @classmethod
    def x(cls, record: Record) -> float | None:
        """Where a record is along a picture; None: it is left out."""
        return getattr(record, cls.key)

    @classmethod
    def pictures(cls, folder: Path, series: Series[Record], chance: float | None) -> list[Picture]:
        means, pairs = means_of(series, cls.x)
        path = Path(f"{cls.name}.png")
        shown = {label: (x, cls.shown(y)) for label, (x, y) in means.items()}
        draw_curves(folder / path, cls.title, cls.x_label, cls.value, shown)
        pictures = [Picture(path, f"{cls.sentence} {_BAND}")]
        if pairs:
            path = Path(f"{cls.name}_difference.png")
            title = f"{cls.title}: on - off"
            draw_curves(folder / path, title, cls.x_label, "nats per token", pairs)
            pictures.append(Picture(path, f"{_DIFFERENCE} {_BAND}"))
        return pictures


def draw_curves(path: Path, title: str, x_label: str, y_label: str, curves: Curves) -> None:
    """A picture of means by `DocumentTask.x`, with their intervals."""
    lines = {label: (x, means.mean.tolist()) for label, (x, means) in curves.items()}
    bands = {label: [y.tolist() for y in means[1:]] for label, (_, means) in curves.items()}
    plot_lines(path, title=title, x_label=x_label, y_label=y_label, series=lines, bands=bands)
