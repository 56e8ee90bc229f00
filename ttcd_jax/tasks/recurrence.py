"""Loss on tokens that complete an n-gram seen before in the row, by the distance back to it."""

import dataclasses
from typing import NamedTuple

import numpy as np

from ttcd_jax.config import Positive
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.selection import Selection
from ttcd_jax.measure.task import Subject, register
from ttcd_jax.tasks.position import FirstTokens
from ttcd_jax.tasks.recall import attention_reach

_SIZES = (2, 3, 4)
_FIRST_EDGE = 16


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
@dataclasses.dataclass(frozen=True, kw_only=True)
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

    def measure(self, scorer: Scorer, rows: Selection, subject: Subject) -> list[SliceLoss]:
        """Sums by n, bucket of distances (-1: new) and document."""
        config = subject.model.config
        longest = max(ids.size for ids in rows.documents)
        window = min(self.window or config.window or longest, longest)
        reach = self.reach or attention_reach(config)
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
        records = []
        for n, bucket, i in np.argwhere(tokens).tolist():
            start, stop = [-1, *edges.tolist()][bucket : bucket + 2]
            region = "new" if start < 0 else f"within the window (0-{window - 1})"
            if start >= window:
                region = f"within reach ({window}-{beyond - 1})"
            if start >= beyond:
                region = f"beyond ({beyond}-)"
            name, at = f"n = {_SIZES[n]}, {region}", (n, bucket, i)
            sums = int(tokens[at]), float(nll[at])
            records.append(SliceLoss(name, _SIZES[n], start, stop, i, *sums))
        return records

    @classmethod
    def x(cls, record: SliceLoss) -> float | None:
        return record.stop if record.n == _SIZES[0] and record.start >= 0 else None
