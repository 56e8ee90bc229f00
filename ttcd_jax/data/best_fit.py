"""Rows in which a document that fits into one is not cut: best-fit packing.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling": a document of more than T targets
is cut into pieces of T and a rest; the longest pieces are placed first, each into the row with the
least room that holds it. Pieces of one length are interchangeable, so rows are planned from the
histogram of lengths: time and size of the plan grow with T, not with the documents.
"""

import bisect
import collections

import numpy as np

from ttcd_jax.data.packing import Row, row_of
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.errors import DataError

# Rows of one kind, and the pieces in each of them: (length, how many).
Kind = tuple[int, list[tuple[int, int]]]


def plan_rows(histogram: np.ndarray, seq_len: int) -> list[Kind]:
    """The rows that best-fit decreasing makes of `histogram[n]` pieces of n tokens, 0 < n <= T."""
    kinds: dict[int, list[Kind]] = collections.defaultdict(list)  # by the room that is left
    rooms: list[int] = []  # those with rows, sorted

    def add(num_rows: int, pieces: list[tuple[int, int]], room: int) -> None:
        if num_rows:
            if not kinds[room]:
                bisect.insort(rooms, room)
            kinds[room].append((num_rows, pieces))

    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            index = bisect.bisect_left(rooms, length)
            room = rooms[index] if index < len(rooms) else seq_len
            fit = room // length  # a row that took a piece has the least room for the next
            num_rows, pieces = kinds[room].pop() if index < len(rooms) else (-(-left // fit), [])
            if index < len(rooms) and not kinds[room]:
                del rooms[index]
            full = min(num_rows, left // fit)
            rest = left - full * fit if full < num_rows else 0
            add(full, [*pieces, (length, fit)], room - fit * length)
            add(min(rest, 1), [*pieces, (length, rest)], room - rest * length)
            add(num_rows - full - min(rest, 1), pieces, room)
            left -= full * fit + rest
    return [kind for room in sorted(kinds) for kind in kinds[room]]


class BestFitRows:
    """Every target of every document once, in rows planned by `plan_rows`, padded in segment 0
    outside the loss: a random-access source. `seed` permutes the pieces of one length.

    In memory: `_order` [pieces], sorted by length; `_before` [documents + 1], the pieces before
    each document; the plan. Raises `DataError` when no document has two tokens.
    """

    def __init__(self, records: TokenRecords, *, seq_len: int, seed: int) -> None:
        self.records, self.seq_len = records, seq_len
        targets = records.sizes - 1
        self._before = np.concatenate([[0], np.cumsum(-(-targets // seq_len))])
        lengths = np.full(self._before[-1], seq_len, np.min_scalar_type(seq_len))
        lengths[self._before[1:][targets > 0] - 1] = (targets[targets > 0] - 1) % seq_len + 1
        if not lengths.size:
            raise DataError(f"{records.where} has no document of 2 tokens; add text")
        order = np.random.default_rng(seed).permutation(lengths.size)
        self._order = order[np.argsort(lengths[order], kind="stable")]
        histogram = np.bincount(lengths)
        firsts = np.cumsum(histogram) - histogram  # the next piece of each length in _order
        self._starts, self._kinds = [0], []
        for num_rows, pieces in plan_rows(histogram, seq_len):
            self._kinds.append([(length, count, firsts[length]) for length, count in pieces])
            for length, count in pieces:
                firsts[length] += num_rows * count
            self._starts.append(self._starts[-1] + num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        kind = bisect.bisect_right(self._starts, index) - 1
        number, pieces = index - self._starts[kind], []
        for length, count, first in self._kinds[kind]:
            for piece in self._order[first + number * count : first + (number + 1) * count]:
                document = np.searchsorted(self._before, piece, side="right") - 1
                pieces.append((document, (piece - self._before[document]) * self.seq_len, length))
        return row_of(self.records, pieces, self.seq_len)
