"""Losses of documents: by position in a row and of the final block by the length of its context, as
in the authors' code, and of tokens that complete an n-gram by the distance back to it."""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
from absl import logging

from ttcd_jax.config import Bound, NonNegative, Positive
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.measure.by_document import DocumentTask, Selection, select
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Subject, register
from ttcd_jax.tasks.perplexity import bucket_edges
from ttcd_jax.tasks.recall import attention_reach

_PER_OCTAVE = 4  # points of the picture of losses by position
_SIZES = (2, 3, 4)  # of n-grams
_FIRST_EDGE = 16  # of the distances back to them
_Contexts = Annotated[tuple[Positive, ...], Bound("one or more, such as 1024,2048", bool)]


class BlockLoss(NamedTuple):
    """The losses of a document's block after so many tokens; `document` None: no document has
    them."""

    context: int
    document: int | None
    tokens: int
    nll: float


@register
class FinalBlock(DocumentTask[BlockLoss]):
    """Fixed-final-block perplexity, as in the authors' code: the last `final_block` tokens of each
    document, after each of `contexts` tokens, read anew. Documents have `min_doc_tokens` (None: the
    longest context and the block), of which the last `seq_len` are kept, until these are
    `token_budget`."""

    name = "final_block"
    title = "Perplexity of the final block by length of context"
    record = BlockLoss
    key = "context"
    x_label = "tokens of context before the block"
    rank = 10
    value = "perplexity"
    sentence = "Every point is the perplexity of the same tokens, after more of the same document."
    shaping = ("contexts", "final_block")

    contexts: _Contexts = (1024, 2048, 4096, 8192, 16384, 24576, 30720)
    final_block: Positive = 1024
    seq_len: Positive = 32768
    token_budget: Positive = 20_000_000
    min_doc_tokens: Positive | None = None

    def validate(self) -> None:
        super().validate()
        longest = max(self.contexts)
        needed = max(longest + self.final_block, self.min_doc_tokens or 0)
        if needed > self.seq_len:
            raise UserError(
                f"contexts up to {longest} and final_block {self.final_block} (min_doc_tokens "
                f"{self.min_doc_tokens}) need {needed} tokens, and seq_len {self.seq_len} are kept "
                "of a document: raise seq_len"
            )

    def choose(self, documents: Iterator[np.ndarray], subject: Subject) -> Selection:
        return select(
            (ids[-self.seq_len :] for ids in documents),
            lambda ids: ids,
            min_tokens=self.min_doc_tokens or max(self.contexts) + self.final_block,
            max_tokens=self.token_budget,
        )

    def rows(self, subject: Subject) -> Selection:
        found, least = super().rows(subject), min(self.contexts) + self.final_block
        if (longest := max(ids.size for ids in found.documents)) < least:
            raise DataError(
                f"the longest document has {longest} tokens, and the shortest context and "
                f"final_block {least}: lower --contexts or --final_block, or take other documents"
            )
        needed = max(x + self.final_block for x in self.contexts if x + self.final_block <= longest)
        if short := sum(ids.size < needed for ids in found.documents):
            logging.warning(
                "final_block: %d of %d documents have fewer than %d tokens, so longer contexts are "
                "of other documents: raise min_doc_tokens",
                *(short, len(found.documents), needed),
            )
        return found

    def measure(self, scorer: Scorer, rows: Selection, subject: Subject) -> Iterator[BlockLoss]:
        for context in sorted(set(self.contexts)):
            size = context + self.final_block
            chosen = {i: ids[-size:] for i, ids in enumerate(rows.documents) if ids.size >= size}
            for i, scores in zip(chosen, scorer.losses([*chosen.values()]), strict=True):
                nll = float(scores.losses[context - 1 :].sum(dtype=np.float64))
                yield BlockLoss(context, i, self.final_block, nll)
            if not chosen:
                yield BlockLoss(context, None, 0, 0.0)


class PositionLoss(NamedTuple):
    """The losses of a document's tokens at positions `start` to `stop`; those of all documents at a
    position have no document and no name."""

    positions: str | None
    start: int
    stop: int
    document: int | None
    tokens: int
    nll: float


class FirstTokens[Record: tuple[Any, ...]](DocumentTask[Record]):
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
class Position(FirstTokens[PositionLoss]):
    """Loss at every position of a row but the first, which has no context."""

    name = "position"
    title = "Loss by position"
    record = PositionLoss
    key = "positions"
    x_label = "position in the row (tokens)"
    has_total = True
    rank = 30
    sentence = "The mean loss of the tokens at a position, over documents, up to the next point."

    def measure(self, scorer: Scorer, rows: Selection, subject: Subject) -> Iterator[PositionLoss]:
        """Sums by document and bucket, then sums over all documents by position, without a
        bucket."""
        losses = [score.losses.astype(np.float64) for score in scorer.losses(rows.documents)]
        length = max(ids.size for ids in rows.documents)
        octaves = np.array(bucket_edges(length))
        steps = np.arange(_PER_OCTAVE * math.log2(length)) / _PER_OCTAVE
        edges = np.unique([*np.round(2**steps).astype(int), *octaves[1:]]).tolist()
        for start, stop in itertools.pairwise(edges):
            octave = np.searchsorted(octaves, start, side="right")
            name = f"{max(octaves[octave - 1], 1)}-{octaves[octave] - 1}"
            for number, nll in enumerate(losses):
                part = nll[start - 1 : stop - 1]
                yield PositionLoss(name, start, stop, number, part.size, float(part.sum()))
        for start in range(1, length):
            nll = [x[start - 1] for x in losses if x.size >= start]
            yield PositionLoss(None, start, start + 1, None, len(nll), float(sum(nll)))

    @classmethod
    def x(cls, record: PositionLoss) -> float | None:
        return None if record.document is None else record.start


class SliceLoss(NamedTuple):
    """The losses of a document's tokens that complete an n-gram seen `start` to `stop` positions
    before, in the slice that the table names; -1: not seen."""

    slice: str
    n: int
    start: int
    stop: int
    document: int
    tokens: int
    nll: float


def distances(ids: np.ndarray, size: int) -> np.ndarray:
    """For every token of `ids` [T] that completes an n-gram of `size` tokens seen before, the
    number of positions from the token before it back to the end of the latest of these; else -1."""
    tokens = np.unique(ids, return_inverse=True)[1]
    names = tokens  # of the n-grams that end at each position, in O(T log T) per token of theirs
    for n in range(1, size):
        names = np.unique(names[:-1] * ids.size + tokens[n:], return_inverse=True)[1]
    order = np.argsort(names, kind="stable")
    is_seen = names[order[1:]] == names[order[:-1]]
    result = np.full(ids.size, -1)
    result[order[1:][is_seen] + size - 1] = np.diff(order)[is_seen] - 1
    return result


@register
class Recurrence(FirstTokens[SliceLoss]):
    """Loss on tokens that complete an n-gram of 2, 3 or 4 tokens that the row had before: the
    associative recall hits of Zoology (Arora et al., 2023), where a memory can help.

    Whatever completes a seen trigram completes a seen bigram too and counts in both slices. The
    distance counts back from the last token read to the one that ended the n-gram when it occurred
    last: below `window`, attention of one layer reads it, and up to `reach`, that of all; None: the
    model's. The slices "new" hold the tokens that complete no n-gram seen before.
    """

    name = "recurrence"
    title = "Loss on tokens that complete an n-gram seen before"
    record = SliceLoss
    key = "slice"
    x_label = "distance back to the last occurrence (tokens, below)"
    rank = 15
    sentence = "Loss on tokens that complete a bigram which the row had before."
    shaping = ("window", "reach")

    window: Positive | None = None
    reach: Positive | None = None

    def measure(self, scorer: Scorer, rows: Selection, subject: Subject) -> Iterator[SliceLoss]:
        """Sums by n, bucket of distances (-1: new) and document."""
        config = subject.model.config
        longest = max(ids.size for ids in rows.documents)
        reach = self.reach or attention_reach(config)
        default = 0 if reach == 0 else config.stream_window or longest
        window = min(self.window or default, longest)
        beyond = longest if reach is None else max(window, min(reach + 1, longest))
        doubled = (_FIRST_EDGE * 2**i for i in range(longest.bit_length()))
        edges = np.unique([0, window, beyond, *(x for x in doubled if x < longest), longest])
        tokens, nll = np.zeros((2, len(_SIZES), len(edges), len(rows)))
        found = zip(rows.documents, scorer.losses(rows.documents), strict=True)
        for i, (ids, scores) in enumerate(found):
            for n, size in enumerate(_SIZES):
                bucket = np.searchsorted(edges, distances(ids, size)[1:], side="right")
                tokens[n, :, i] = np.bincount(bucket, minlength=len(edges))
                nll[n, :, i] = np.bincount(bucket, weights=scores.losses, minlength=len(edges))
        for n, bucket, i in np.argwhere(tokens).tolist():
            start, stop = [-1, *edges.tolist()][bucket : bucket + 2]
            region = "new" if start < 0 else f"within the window (0-{window - 1})"
            if start >= window:
                region = f"within reach ({window}-{beyond - 1})"
            if start >= beyond:
                region = f"beyond ({beyond}-)"
            size, sums = _SIZES[n], (int(tokens[n, bucket, i]), nll[n, bucket, i])
            yield SliceLoss(f"n = {size}, {region}", size, start, stop, i, *sums)

    @classmethod
    def x(cls, record: SliceLoss) -> float | None:
        return record.stop if record.n == _SIZES[0] and record.start >= 0 else None
