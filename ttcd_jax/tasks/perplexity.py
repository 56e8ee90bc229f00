"""Perplexity by context length."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from ttcd_jax.config import Positive
from ttcd_jax.data.packing import DocumentRows
from ttcd_jax.data.sources import text_records
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.measure.by_document import means_over_documents
from ttcd_jax.measure.scorer import Scorer, Scores
from ttcd_jax.measure.task import (
    Arrays,
    Differences,
    RowTask,
    Series,
    Subject,
    register,
    row_scores,
)

_FIRST_EDGE = 32
_ANY_LENGTH = 2**20  # rows may be longer than the text up to here


class PositionLoss(NamedTuple):
    """The loss of the targets at positions `start` to `stop` of a `row`, None: of all. The field
    `bits_per_byte` divides by the bytes of the targets, so that tokenizers are comparable; None if
    no target has bytes."""

    context: str
    start: int
    stop: int
    tokens: int
    perplexity: float
    bits_per_byte: float | None
    row: int | None = None


def bucket_edges(length: int) -> list[int]:
    """0, 32, 64, 128, ... up to `length`, which closes the last bucket."""
    doubled = (_FIRST_EDGE * 2**index for index in itertools.count())
    return [0, *itertools.takewhile(lambda edge: edge < length, doubled), length]


def buckets(length: int) -> Iterator[tuple[str, int, int]]:
    """(name, start, stop) of every bucket of positions below `length`, and of "all"."""
    for start, stop in dict.fromkeys([*itertools.pairwise(bucket_edges(length)), (0, length)]):
        yield "all" if stop - start == length else f"{start}-{stop - 1}", start, stop


def by_position(
    scores: Scores, rows: Arrays, tokenizer: Tokenizer, row: int | None = None
) -> Iterator[PositionLoss]:
    """One record per bucket of positions, and `all`."""
    num_bytes = tokenizer.num_bytes(rows["targets"])
    for context, start, stop in buckets(rows["tokens"].shape[1]):
        part = np.s_[:, start:stop]
        mask = rows["loss_mask"][part]
        if not mask.any():
            continue
        nats = float(scores.losses[part][mask].astype(np.float64).sum())
        tokens, size = int(mask.sum()), int(num_bytes[part][mask].sum())
        perplexity = math.exp(min(nats / tokens, 700))
        bits = nats / math.log(2) / size if size else None
        yield PositionLoss(context, start, stop, tokens, perplexity, bits, row)


@register
class Perplexity(RowTask[PositionLoss]):
    """Perplexity on `text`, a text file or a folder of .txt files, or the run's held-out text for
    None. `seq_len`: tokens per row; None: as in training."""

    name = "ppl"
    title = "Held-out text: bits per byte by context length"
    record = PositionLoss
    key = "context"
    x_label = "context length (tokens)"
    rank = 35
    is_lower_better = True
    interval = "rows"

    text: str | None = None
    seq_len: Positive | None = None

    def source(self, subject: Subject) -> Any:
        records = text_records(subject.run_dir, subject.data, subject.tokenizer, self.text)
        seq_len = self.seq_len or subject.data.get("seq_len")
        longest = max(_ANY_LENGTH, sum(int(part.sizes.sum()) for part in records))
        if type(seq_len) is not int or not 0 < seq_len <= longest:
            raise DataError(f"seq_len {seq_len} is not in 1 .. {longest}: pass --seq_len=N")
        parts = [DocumentRows(part, seq_len=seq_len) for part in records]
        return grain.MapDataset.concatenate([grain.MapDataset.source(part) for part in parts])

    def measure(self, scorer: Scorer, rows: Arrays, subject: Subject) -> Iterator[PositionLoss]:
        assert subject.tokenizer is not None, "text_records refuses a run without one"
        scores = row_scores(scorer, rows)
        for row in (None, *range(len(rows["tokens"]))):
            part = slice(row, None if row is None else row + 1)
            found = Scores(*(field[part] for field in scores))
            own = {name: field[part] for name, field in rows.items()}
            yield from by_position(found, own, subject.tokenizer, row)

    @classmethod
    def columns(cls, series: Series[PositionLoss]) -> dict[str, dict[Any, Any]]:
        return super().columns({name: _of_all(records) for name, records in series.items()})

    @classmethod
    def differences(
        cls, seeds: Sequence[Sequence[PositionLoss]], base: Sequence[Sequence[PositionLoss]]
    ) -> Differences:
        """Over rows, or seeds and rows; records of earlier versions have no row. Where a bucket has
        no bytes, of the perplexity."""
        found = [_sums(records) for records in (*seeds, *base)]
        names, _, sizes = found[0]
        if not sizes.any(axis=0).all() or not all(
            x[0] == names and np.array_equal(x[2], sizes) for x in found
        ):
            return super().differences(seeds, base)
        nll = np.stack([x[1] for x in found])
        means = means_over_documents(nll[: len(seeds)] - nll[len(seeds) :], sizes)
        return dict(zip(names, zip(*(x.tolist() for x in means), strict=True), strict=True))

    @classmethod
    def unit(cls, series: Series[PositionLoss]) -> tuple[str, str]:
        first = next(iter(series.values()), [])
        if all(record.bits_per_byte is not None for record in _of_all(first)):
            return "bits_per_byte", "bits per byte"
        return "perplexity", "perplexity"

    @classmethod
    def curves(cls, series: Series[PositionLoss]) -> dict[str, tuple[list[Any], list[Any]]]:
        value, lines = cls.unit(series)[0], {}
        for name, records in series.items():
            records = _of_all(records)
            parts = [record for record in records if record.context != "all"] or records
            lines[name] = [x.stop for x in parts], [getattr(x, value) for x in parts]
        return lines


def _of_all(records: Sequence[PositionLoss]) -> list[PositionLoss]:
    return [x for x in records if x.row is None]


def _sums(records: Sequence[PositionLoss]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Buckets, and the bits and bytes [rows, buckets] of the records of single rows."""
    names = [x.context for x in _of_all(records)]
    bits, sizes = np.zeros((2, 1 + max((x.row or 0 for x in records), default=0), len(names)))
    for x in records:
        if x.row is not None and x.context in names:
            where = x.row, names.index(x.context)
            bits[where] = x.tokens * math.log2(x.perplexity)
            if x.bits_per_byte:  # else of eos alone, which has no bytes
                sizes[where] = round(bits[where] / x.bits_per_byte)
    return names, bits, sizes
