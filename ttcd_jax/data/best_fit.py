"""Rows in which no document is cut that fits into one: best-fit packing.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling": a document of more than T targets
is cut into rows of T, and the pieces of less are placed, the longest first, each into the row with
the least room that holds it. Pieces of one length are interchangeable, so rows are planned from the
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
    """The rows that best-fit decreasing makes of `histogram[n]` pieces of n tokens, 0 < n < T."""
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
            place = bisect.bisect_left(rooms, length)
            room = rooms[place] if place < len(rooms) else seq_len
            fit = room // length  # a row that took a piece has the least room for the next
            num_rows, pieces = kinds[room].pop() if place < len(rooms) else (-(-left // fit), [])
            if place < len(rooms) and not kinds[room]:
                del rooms[place]
            full = min(num_rows, left // fit)
            rest = left - full * fit if full < num_rows else 0
            add(full, [*pieces, (length, fit)], room - fit * length)
            add(min(rest, 1), [*pieces, (length, rest)], room - rest * length)
            add(num_rows - full - min(rest, 1), pieces, room)
            left -= full * fit + rest
    return [kind for room in sorted(kinds) for kind in kinds[room]]


class BestFitRows:
    """Every target of every document once, in rows planned by `plan_rows`, padded in segment 0
    outside the loss: a random-access source. `seed` permutes the documents of one length.

    In memory: `_order` [documents], by the length of the piece that does not fill a row; the
    documents that fill rows; the plan. Raises `DataError` when no document has two tokens.
    """

    def __init__(self, records: TokenRecords, *, seq_len: int, seed: int) -> None:
        self.records, self.seq_len = records, seq_len
        targets = records.sizes - 1
        self._long = np.flatnonzero(targets >= seq_len)
        self._long_ends = np.cumsum([0, *(targets[self._long] // seq_len)])
        rests = (targets % seq_len).astype(np.min_scalar_type(seq_len))
        histogram = np.bincount(rests, minlength=1)
        order = np.random.default_rng(seed).permutation(len(records))
        self._order = order[np.argsort(rests[order], kind="stable")][histogram[0] :]
        histogram[0] = 0
        kinds = plan_rows(histogram, seq_len)
        # Kind k has the rows from _starts[k] on, and the entries from _entries[k] on.
        self._starts = np.cumsum([self._long_ends[-1], *(num_rows for num_rows, _ in kinds)])
        self._entries = np.cumsum([0, *(len(pieces) for _, pieces in kinds)])
        table = np.array([entry for _, pieces in kinds for entry in pieces], np.int64)
        self._lengths, self._counts = table.reshape(-1, 2).T
        taken = self._counts * np.repeat(np.diff(self._starts), np.diff(self._entries))
        by_length = np.argsort(self._lengths, kind="stable")
        self._firsts = np.empty_like(taken)  # of an entry's documents in _order
        self._firsts[by_length] = np.cumsum(taken[by_length]) - taken[by_length]
        if not len(self):
            raise DataError(f"{records.where} has no document of 2 tokens; add text")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return row_of(self.records, self._pieces(int(index)), self.seq_len)

    def _pieces(self, index: int) -> list[tuple[int, int, int]]:
        """(document, start, inputs) of a row."""
        if index < self._starts[0]:
            place = np.searchsorted(self._long_ends, index, side="right") - 1
            start = (index - self._long_ends[place]) * self.seq_len
            return [(self._long[place], start, self.seq_len)]
        kind = np.searchsorted(self._starts, index, side="right") - 1
        pieces = []
        for entry in range(self._entries[kind], self._entries[kind + 1]):
            length, count = self._lengths[entry], self._counts[entry]
            first = self._firsts[entry] + (index - self._starts[kind]) * count
            documents = self._order[first : first + count]
            ends = self.records.starts[documents + 1] - self.records.starts[documents] - 1
            pieces += [(d, end - length, length) for d, end in zip(documents, ends, strict=True)]
        return pieces
