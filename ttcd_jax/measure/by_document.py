"""Evaluations of losses that are summed by document: the choice of documents and its manifest, and
means with their intervals and differences."""

import abc
import dataclasses
import functools
import hashlib
import io
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.special import stdtrit
from ttcd_kernels.table import Row

from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.sources import text_records
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import parse_json, read_arrays
from ttcd_jax.measure.pictures import Picture, plot_lines
from ttcd_jax.measure.task import (
    MEMORY_OFF,
    MEMORY_ON,
    Differences,
    Series,
    Subject,
    Task,
    table_of,
)
from ttcd_jax.tokens import check_tokens

_QUANTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
_LENGTHS = (2048, 4096, 8192, 16384, 32768)
_BLANK_TOKENS = 1024  # decoded at once
_COVERAGE = 0.95
LEAST_DOCUMENTS = 5  # with an interval
_DIFFERENCE = "Fast weights on minus off, on the same tokens: below 0 they help."
_BAND = "Bands: 95 % intervals over documents; lower is better."


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """Token ids [T] of each document, metadata of the choice, and the digest of the tokenizer ("":
    unknown). `asked` [T - 1]: of drawn rows the target of every token but the last, -1: none."""

    documents: Sequence[np.ndarray]
    stats: dict[str, Any]
    tokenizer: str = ""
    asked: Sequence[np.ndarray] = ()

    def __len__(self) -> int:
        return len(self.documents)

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            "flat_tokens": np.concatenate(self.documents).astype(np.int32),
            "lengths": np.array([ids.size for ids in self.documents], np.int32),
            "document_stats_json": np.array(json.dumps(self.stats)),
        }

    @functools.cached_property
    def digest(self) -> str:
        """The sha256 of documents and metadata."""
        parts = (hashlib.sha256(array.tobytes()).digest() for array in self._arrays.values())
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def manifest(self) -> bytes:
        """An npz file with the published arrays, `flat_tokens` int32, `lengths` int32 and
        `document_stats_json`, and the digest of the tokenizer."""
        file, made_by = io.BytesIO(), np.array(self.tokenizer)
        np.savez_compressed(file, allow_pickle=False, tokenizer=made_by, **self._arrays)
        return file.getvalue()


def plain_documents(records: Iterable[TokenRecords], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Ids [T] of the documents in order, without the bos and eos added to them or blank ones."""
    for part in records:
        for number, size in enumerate(part.sizes.tolist()):
            ids = part.read(number, 0, size)
            if not part.samples_are_rows:
                start, stop = ids[0] == tokenizer.bos_id, ids[-1] == tokenizer.eos_id
                ids = ids[int(start) : size - int(stop)]
            pieces = (ids[i : i + _BLANK_TOKENS] for i in range(0, ids.size, _BLANK_TOKENS))
            if any(tokenizer.decode(piece).strip() for piece in pieces):
                yield ids


def first_texts(
    records: Iterable[TokenRecords], tokenizer: Tokenizer, num_tokens: int
) -> Iterator[str]:
    """The texts of the first documents, at most `num_tokens` in all."""
    for part in records:
        for document, size in enumerate(part.sizes.tolist()):
            if num_tokens <= 0:
                return
            yield tokenizer.decode(part.read(document, 0, min(size, num_tokens)))
            num_tokens -= size


def select(
    documents: Iterable[np.ndarray],
    cut: Callable[[np.ndarray], np.ndarray],
    *,
    min_tokens: int,
    max_documents: float = math.inf,
    max_tokens: float = math.inf,
) -> Selection:
    """The first documents of `min_tokens` or more, each reduced by `cut`, until one of both limits
    is reached, with the published numbers about lengths. Raises `DataError` if there is none."""
    lengths: list[int] = []
    chosen: list[np.ndarray] = []
    num_tokens = 0
    for ids in documents:
        lengths.append(ids.size)
        if ids.size >= min_tokens:
            chosen.append(cut(ids).astype(np.int32))
            num_tokens += chosen[-1].size
            if num_tokens >= max_tokens or len(chosen) >= max_documents:
                break
    if not chosen:
        raise DataError(
            f"none of {len(lengths)} documents has {min_tokens} tokens (longest: "
            f"{max(lengths, default=0)}): take shorter rows or contexts, or name longer documents "
            "by --text=PATH"
        )
    eligible = [length for length in lengths if length >= min_tokens]
    stats = {
        "sampled_docs": len(lengths),
        "sampled_doc_length_quantiles": _quantiles(lengths),
        "eligible_docs": len(eligible),
        "eligible_total_tokens": sum(eligible),
        "selected_total_tokens": num_tokens,
        "min_doc_tokens": min_tokens,
        "selected_doc_length_quantiles": _quantiles([ids.size for ids in chosen]),
    }
    for least in _LENGTHS:
        long = [length for length in eligible if length >= least]
        stats[f"sampled_docs_ge_{least}"] = sum(length >= least for length in lengths)
        stats |= {f"eligible_docs_ge_{least}": len(long), f"eligible_tokens_ge_{least}": sum(long)}
    return Selection(chosen, stats)


def _quantiles(lengths: Sequence[int]) -> dict[str, int]:
    found = np.quantile(lengths, [*_QUANTILES.values()], method="lower")
    return dict(zip(_QUANTILES, found.tolist(), strict=True))


def read_manifest(path: Path, tokenizer: str) -> Selection:
    """The selection of a manifest, of `Selection.manifest` or of the authors' code, whose ids may
    be outside the vocabulary. Raises `DataError` for another kind of file, and for one of another
    tokenizer."""
    try:
        arrays = read_arrays(path)
        tokens, lengths = arrays["flat_tokens"], arrays["lengths"]
        stats = parse_json(str(arrays["document_stats_json"]).encode(), path)
        made_by = str(arrays.get("tokenizer", ""))
        arrays_are_lists = all(x.ndim == 1 and x.dtype.kind in "iu" for x in (tokens, lengths))
        if not (arrays_are_lists and lengths.size and lengths.min() > 1):
            raise ValueError("its arrays are of another kind")
        if lengths.max() > tokens.size or lengths.sum(dtype=np.int64) != tokens.size:
            raise ValueError(f"it has {tokens.size} tokens, and other lengths: {lengths[:3]}...")
    except (LookupError, ValueError) as error:
        raise DataError(
            f"{path} is no manifest of documents ({error}): name the documents.npz of an evaluation"
        ) from error
    if made_by and tokenizer and made_by != tokenizer:
        raise DataError(
            f"{path} was made by another tokenizer ({made_by[:12]}) than the run's "
            f"({tokenizer[:12]}): evaluate runs of one tokenizer together"
        )
    return Selection(np.split(tokens, np.cumsum(lengths[:-1])), stats, made_by or tokenizer)


class Means(NamedTuple):
    """Means [K] and the ends of their intervals [K]; NaN where they are unknown."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def means_over_documents(sums: np.ndarray, counts: np.ndarray) -> Means:
    """The means per token of K quantities, from their `sums` over the tokens of each document and
    the `counts` of these tokens, both [documents, K]; or of several seeds [seeds, documents, K].

    A mean is the ratio of the two totals, its variance that of the jackknife over documents (for
    equal ones that of a ratio estimator: Cochran, Sampling Techniques, 1977, 6.3), and its interval
    Student's t with one degree of freedom less than documents with tokens, of unequal ones than
    1 / sum(shares^2), which holds for few documents too. It is unknown with fewer than five, whose
    losses say too little of others. For a difference of two models, give the differences of their
    sums: the interval is that of pairs.

    Seeds and documents are crossed random effects: with their mean squares M and that of the rest
    the variance is (M_seeds + M_documents - M_rest) / (seeds documents), at least either of the
    first two, with the degrees of freedom of Satterthwaite (1946). The interval is at least
    Student's t of the means of the seeds: of two or three, these degrees say too little.
    """
    sums = sums[None] if sums.ndim == 2 else sums
    counts = np.broadcast_to(counts, sums.shape)
    seeds, documents = len(sums), (counts != 0).any(axis=0).sum(axis=0)
    total = counts.mean(axis=0).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = sums.mean(axis=0).sum(axis=0) / total
        weights = counts / (total / documents)
        rest = (sums - mean * counts) / (total / documents)  # a mean of 0
        of_document, of_seed = rest.mean(axis=0), rest.sum(axis=1, keepdims=True) / documents
        shares = counts.mean(axis=0) / total
        rest, of_document = (
            x * (1 - 1 / documents) / (1 - shares)  # as when its document is left out
            for x in (rest - of_document - weights * of_seed, of_document)
        )
        squares = seeds * of_document[None] ** 2, documents * of_seed**2, rest**2
        sizes, free = (_degrees(seeds, x) for x in (documents, 1 / (shares**2).sum(axis=0)))
        mean_squares = np.stack([x.sum(axis=(0, 1)) for x in squares]) / sizes
        variance = mean_squares[0] + mean_squares[1] - mean_squares[2]
        variance = np.maximum(variance, mean_squares[:2].max(axis=0))
        freedom = variance**2 / (mean_squares**2 / free).sum(axis=0)
        freedom = np.fmax(freedom, free[:2].min(axis=0))
        # Of all, and of the seeds alone.
        variances, freedoms = np.stack((variance, mean_squares[1])), np.stack((freedom, free[1]))
        errors = np.sqrt(variances / (seeds * documents))
        half = np.max(errors * stdtrit(freedoms, (1 + _COVERAGE) / 2), axis=0)
    half = np.where(documents >= LEAST_DOCUMENTS, half, np.nan)
    return Means(mean, mean - half, mean + half)


def _degrees(seeds: int, documents: np.ndarray) -> np.ndarray:
    """Of freedom [3, K], of `documents`, seeds and the rest, at least one."""
    free = documents - 1, 0 * documents + seeds - 1, (documents - 1) * (seeds - 1)
    return np.maximum(np.stack(free), 1)


type Bucket = Callable[[Any], Any]  # of a record; None: it is left out
type Curve = tuple[list[Any], Means]  # the buckets, and their means
type Curves = dict[str, Curve]  # by label


def means_of(series: Series[Any], bucket: Bucket) -> tuple[Curves, Curves]:
    """Nats per token of the records of every series by `bucket`, and by run those of its variant
    with the memory on minus off, in pairs."""
    means, pairs = {}, {}
    for label, records in series.items():
        means[label] = means_over_seeds([records], bucket)
        run = label.removesuffix(f", {MEMORY_ON}")
        if run != label and (off := series.get(f"{run}, {MEMORY_OFF}")):
            pairs[run] = means_over_seeds([records], bucket, [off])
    return means, pairs


def means_over_seeds(
    seeds: Sequence[Sequence[Any]], bucket: Bucket, base: Sequence[Sequence[Any]] = ()
) -> Curve:
    """The buckets, and nats per token of the records of all `seeds`, less those of the same seeds
    of a `base` if there is one. Raises `UserError` for records of other tokens or buckets."""
    names, nll, tokens = _paired_sums([*seeds, *base], bucket)
    sums = nll[: len(seeds)] - (nll[len(seeds) :] if base else 0)
    return names, means_over_documents(sums, tokens)


def _paired_sums(
    series: Sequence[Sequence[Any]], bucket: Bucket
) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """(buckets, sums of losses [series, documents, buckets], numbers of tokens)."""
    (names, _, tokens), *others = found = [_sums(records, bucket) for records in series]
    if not all(x == names and np.array_equal(y, tokens) for x, _, y in others):
        raise UserError(
            "two models were evaluated on other tokens or in other buckets: evaluate both with the "
            "same options (of recurrence, window and reach too)"
        )
    return names, np.stack([nll for _, nll, _ in found]), tokens


def _sums(records: Sequence[Any], bucket: Bucket) -> tuple[list[Any], np.ndarray, np.ndarray]:
    kept = [(name, x) for x in records if (name := bucket(x)) is not None]
    names = [*dict.fromkeys(name for name, _ in kept)]
    documents = sorted({x.document or 0 for _, x in kept if x.tokens})
    columns, rows = ({x: i for i, x in enumerate(found)} for found in (names, documents))
    sums = np.zeros((2, len(rows), len(columns)))
    for name, x in kept:
        if x.tokens:
            sums[:, rows[x.document or 0], columns[name]] += x.nll, x.tokens
    return names, sums[0], sums[1]


def cells(names: list[Any], means: Means, *, has_ends: bool = False) -> dict[Any, str | None]:
    """The means by name with half of their intervals, "2.345 ± 0.012", or with their ends, "9.310
    (8.204 to 10.633)"; None for an unknown mean."""
    result: dict[Any, str | None] = {}
    for name, mean, low, high in zip(names, *means, strict=True):
        form = ",.3f" if abs(mean) < 1e6 else ".3e"
        ends = f" ({low:{form}} to {high:{form}})" if has_ends else f" ± {(high - low) / 2:{form}}"
        ends = " (no interval)" if math.isnan(high - low) else ends
        result[name] = None if math.isnan(mean) else f"{mean:{form}}{ends}"
    return result


class DocumentTask[Record: tuple[Any, ...]](Task[Selection, Record]):
    """Losses on documents without special tokens: those of `text`, a file or folder; None: the
    run's held-out text. `manifest`: exactly those of another evaluation, its documents.npz, to
    which the options that choose documents do not apply.
    """

    # A record is of some tokens of a document: has its number `document` (None: of several), the
    # number of the `tokens`, and the sum `nll` of their losses in nats.
    value = "nats per token"  # or perplexity
    is_lower_better = True
    difference = "nats per token"
    interval = "documents"
    shaping = ()
    has_total: ClassVar[bool] = False  # of all buckets, in the table's last row

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
            chosen = Selection(chosen.documents, stats, digest)
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
    def shown(cls, means: Means) -> Means:
        """The value of means in tables and pictures."""
        return Means(*np.exp(np.minimum(means, 700))) if cls.value == "perplexity" else means

    @classmethod
    def cells(cls, names: list[Any], means: Means) -> dict[Any, str | None]:
        """The `cells` of means; those of a perplexity have the ends of nats, exponentiated."""
        return cells(names, cls.shown(means), has_ends=cls.value == "perplexity")

    @classmethod
    def table(cls, series: Series[Record]) -> list[Row]:
        """A row per bucket: every series and every difference, with their intervals."""
        rows: list[Row] = []
        for bucket in cls._buckets()[: 1 + cls.has_total]:
            means, pairs = means_of(series, bucket)
            columns: dict[str, dict[Any, str | None]] = {}
            for label, curve in means.items():
                columns[label] = cls.cells(*curve)
                if pair := pairs.get(run := label.removesuffix(f", {MEMORY_OFF}")):
                    columns[f"{run}, on - off (nats)"] = cells(*pair)
            rows += table_of(cls.key, columns)
        return rows

    @classmethod
    def _buckets(cls) -> list[Bucket]:
        """Those of records, and that of all."""
        own = operator.attrgetter(cls.key)
        return [own, lambda record: None if own(record) is None else "all"]

    @classmethod
    def within(cls, seeds: Sequence[Sequence[Record]]) -> Curve | None:
        """Differences inside the records of one model, of all `seeds`; None of a task whose buckets
        are those of every model."""
        return None

    @classmethod
    def headroom(cls, seeds: Sequence[Series[Record]], control: str, ceiling: str) -> list[Row]:
        """A row per bucket, and one of all: the share of the headroom, the losses of `control` less
        those of `ceiling`, that every other series gives back, a ratio of totals over documents,
        with its interval; none in a bucket where no headroom is seen, in whose interval is 0.
        Raises as `means_over_seeds`."""
        rows: dict[Any, dict[str, Any]] = {}
        for bucket in cls._buckets():
            for label in (x for x in seeds[0] if x not in (control, ceiling)):
                found = [series[x] for x in (label, control, ceiling) for series in seeds]
                names, nll, tokens = _paired_sums(found, bucket)
                own, top, low = np.split(nll, 3)
                room = means_over_documents(top - low, tokens)
                has_none = np.where(np.isnan(room.low), room.mean, room.low) <= 0
                shares = means_over_documents(top - own, top - low)
                shares = Means(*(np.where(has_none, np.nan, x) for x in shares))
                for name, cell in cells(names, shares).items():
                    rows.setdefault(name, {cls.key: name})[label] = cell
        return [*rows.values()]

    @classmethod
    def differences(
        cls, seeds: Sequence[Sequence[Record]], base: Sequence[Sequence[Record]]
    ) -> Differences:
        found = {}
        for bucket in cls._buckets()[: 1 + cls.has_total]:
            names, means = means_over_seeds(seeds, bucket, base)
            found |= zip(names, zip(*(x.tolist() for x in means), strict=True), strict=True)
        return {name: ends for name, ends in found.items() if not math.isnan(ends[0])}

    @classmethod
    def columns(cls, series: Series[Record]) -> dict[str, dict[Any, Any]]:
        """The means without their intervals."""
        means, _ = means_of(series, operator.attrgetter(cls.key))
        return {
            label: dict(zip(names, cls.shown(x).mean.tolist(), strict=True))
            for label, (names, x) in means.items()
        }

    @classmethod
    def x(cls, record: Any) -> float | None:
        """Where a record is along a picture; None: it is left out."""
        return getattr(record, cls.key)

    @classmethod
    def pictures(cls, folder: Path, series: Series[Record], chance: float | None) -> list[Picture]:
        means, pairs = means_of(series, cls.x)
        path = Path(f"{cls.name}.svg")
        shown = {label: (x, cls.shown(y)) for label, (x, y) in means.items()}
        draw_curves(folder / path, cls.title, cls.x_label, cls.value, shown)
        pictures = [Picture(path, f"{cls.sentence} {_BAND}")]
        if pairs:
            path, title = Path(f"{cls.name}_difference.svg"), f"{cls.title}: memory on less off"
            draw_curves(folder / path, title, cls.x_label, "nats per token, below 0 helps", pairs)
            pictures.append(Picture(path, f"{_DIFFERENCE} {_BAND}"))
        return pictures


def draw_curves(path: Path, title: str, x_label: str, y_label: str, curves: Curves) -> None:
    """A picture of means by `DocumentTask.x`, with their intervals."""
    lines = {label: (x, means.mean.tolist()) for label, (x, means) in curves.items()}
    bands = {label: [y.tolist() for y in means[1:]] for label, (_, means) in curves.items()}
    plot_lines(path, title=title, x_label=x_label, y_label=y_label, series=lines, bands=bands)
