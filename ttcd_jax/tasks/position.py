"""Loss by position in a row of one document, as in the authors' code."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from ttcd_kernels.table import Row

from ttcd_jax.config import NonNegative, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.measure.by_document import DocumentRecord, DocumentTask
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.selection import Selection, select
from ttcd_jax.measure.task import Series, Subject, register
from ttcd_jax.tasks.perplexity import bucket_edges

_PER_OCTAVE = 4  # points of the picture


class PositionLoss(NamedTuple):
    """The losses of a document's tokens at positions `start` to `stop`; those of all documents at a
    position have no document and no name."""

    positions: str | None
    start: int
    stop: int
    document: int | None
    tokens: int
    nll: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstTokens[Record: DocumentRecord](DocumentTask[Record]):
    """Tokens `offset` to `offset + seq_len` of the first `max_rows` documents that have them; with
    `offset_max`, each offset is drawn from 0 to that by `seed`. `seq_len` None: as in training."""

    seq_len: Positive | None = None
    max_rows: Positive = 50
    offset: NonNegative = 0
    offset_max: NonNegative = 0
    seed: NonNegative = 0

    def validate(self) -> None:
        super().validate()
        if self.offset and self.offset_max:
            raise UserError(
                f"offset {self.offset} is fixed and offset_max {self.offset_max} bounds drawn ones:"
                " give one"
            )

    def choose(self, documents: Iterator[np.ndarray], subject: Subject) -> Selection:
        seq_len = self.seq_len or subject.data.get("seq_len")
        if type(seq_len) is not int or seq_len < 2:
            raise UserError(f"seq_len {seq_len} is not 2 or more: pass --seq_len=N")
        rng = np.random.default_rng(self.seed)

        def cut(ids: np.ndarray) -> np.ndarray:
            start = int(rng.integers(self.offset_max + 1)) if self.offset_max else self.offset
            return ids[start : start + seq_len]

        needed = max(self.offset, self.offset_max) + seq_len
        return select(documents, cut, min_tokens=needed, max_documents=self.max_rows)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Position(FirstTokens[PositionLoss]):
    """Loss at every position of a row but the first, which has no context."""

    name = "position"
    title = "Loss by position"
    record = PositionLoss
    key = "positions"
    x_label = "position in the row (tokens)"
    rank = 30
    sentence = "The mean loss of the tokens at a position, over documents, up to the next point."

    def measure(self, scorer: Scorer, rows: Selection, subject: Subject) -> list[PositionLoss]:
        """Sums by document and bucket, then sums over all documents by position, without a
        bucket."""
        losses = [score.losses.astype(np.float64) for score in scorer.losses(rows.documents)]
        length = max(ids.size for ids in rows.documents)
        octaves = np.array(bucket_edges(length))
        steps = np.arange(_PER_OCTAVE * math.log2(length)) / _PER_OCTAVE
        edges = np.unique([*np.round(2**steps).astype(int), *octaves[1:]]).tolist()
        records, totals = [], np.zeros((2, length))
        for start, stop in itertools.pairwise(edges):
            octave = np.searchsorted(octaves, start, side="right")
            name = f"{max(octaves[octave - 1], 1)}-{octaves[octave] - 1}"
            for number, nll in enumerate(losses):
                part = nll[start - 1 : stop - 1]
                sums = part.size, float(part.sum())
                records.append(PositionLoss(name, start, stop, number, *sums))
        for nll in losses:
            totals[:, 1 : nll.size + 1] += np.ones(nll.size), nll
        for start, (tokens, nll) in enumerate(totals.T[1:].tolist(), 1):
            records.append(PositionLoss(None, start, start + 1, None, int(tokens), nll))
        return records

    @classmethod
    def x(cls, record: PositionLoss) -> float | None:
        return None if record.document is None else record.start

    @classmethod
    def table(cls, series: Series[PositionLoss]) -> list[Row]:
        """Rows by octaves of positions, and of all."""
        whole = {
            label: [x._replace(positions=x.positions and "all") for x in records]
            for label, records in series.items()
        }
        return super().table(series) + super().table(whole)
