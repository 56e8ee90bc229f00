"""Documents as rows of T tokens, by index: packed for training, cut at the ends of rows or best-fit
where they are not; one per row for evaluation.

A document becomes bos + tokens + eos. A row is a dict of arrays [T]:

    tokens       int32   inputs
    targets      int32   the token after each input
    segment_ids  int32   1, 2, ... : the document of the row that the input belongs to (0: padding);
                         absent where every row is one document
    positions    int32   position of the input in its document's part of the row
    loss_mask    bool    whether the target counts in the loss
"""

import bisect
import collections
import re
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from ttcd_jax.data.documents import Document
from ttcd_jax.data.records import TokenRecords, token_dtype
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.tokens import check_tokens

Row = dict[str, np.ndarray]


def encode_documents(
    documents: list[Document], tokenizer: Tokenizer, samples_are_rows: bool = False
) -> TokenRecords:
    """The documents as token records in memory, each as bos + tokens + eos, or with
    `samples_are_rows` as its own token ids. Raises `DataError` naming a document that is not UTF-8
    (with a `tokenizer.json`) or has ids outside the tokenizer's vocabulary."""
    dtype, ids, starts = token_dtype(tokenizer.vocab_size), bytearray(), [0]
    for document in documents:
        try:
            for part in _encode(document, tokenizer, samples_are_rows):
                ids += np.asarray(part, dtype).data
        except DataError as error:
            raise DataError(f"{document.name}: {error}") from error
        starts.append(len(ids) // dtype.itemsize)
    return TokenRecords(
        [np.frombuffer(ids, dtype)],
        np.array(starts),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        num_files=len({re.sub(r":\d+$", "", document.name) for document in documents}),
    )


def _encode(document: Document, tokenizer: Tokenizer, is_row: bool) -> Iterator[ArrayLike]:
    bos, eos, ids = [tokenizer.bos_id], [tokenizer.eos_id], document.tokens
    if ids is None:
        if is_row:
            raise DataError("this is text, and a sample that is a row has token ids")
        yield bos
        yield from tokenizer.encode_pieces(document.text)
        yield eos
        return
    check_tokens(ids, tokenizer.vocab_size)
    yield [] if is_row or ids[:1].tolist() == bos else bos
    yield ids
    yield [] if is_row or ids[-1:].tolist() == eos else eos


class PackedRows:
    """All documents, permuted by `seed`, as one stream divided into rows: a random-access source.

    Row r reads the stream at [r*T, r*T + T], T + 1 tokens of which the last is only a target; a
    remainder that does not fill a row is dropped. `loss_mask` is False where the target begins a
    document. In memory: `order` [documents], the documents as streamed, and `starts`
    [documents + 1], their offsets. Raises `DataError` when the stream does not fill one row.
    """

    def __init__(self, records: TokenRecords, *, seq_len: int, seed: int) -> None:
        self.records, self.seq_len = records, seq_len
        self.order = np.random.default_rng(seed).permutation(len(records))
        self.starts = np.zeros(len(records) + 1, np.int64)
        np.cumsum(records.sizes[self.order], out=self.starts[1:])
        if self.starts[-1] < seq_len + 1:
            raise DataError(
                f"{records.where} has {self.starts[-1]} tokens and a row takes {seq_len + 1} "
                f"(seq_len {seq_len} and a target); add text or lower seq_len"
            )

    def __len__(self) -> int:
        return int(self.starts[-1] - 1) // self.seq_len

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = int(index) * self.seq_len
        stop = start + self.seq_len + 1
        first, last = np.searchsorted(self.starts, [start, stop - 1], side="right") - 1
        origins = self.starts[first : last + 1]
        begins = np.maximum(origins, start)
        ends = np.minimum(self.starts[first + 1 : last + 2], stop)
        documents = self.order[first : last + 1]
        parts = map(self.records.read, documents, begins - origins, ends - origins)
        tokens = np.concatenate([*parts]).astype(np.int32)
        segments = np.repeat(np.arange(1, begins.size + 1, dtype=np.int32), ends - begins)
        positions = np.arange(start, stop) - np.repeat(begins, ends - begins)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segment_ids": segments[:-1],
            "positions": positions[:-1].astype(np.int32),
            "loss_mask": segments[1:] == segments[:-1],
        }


class DocumentRows:
    """Every document divided into rows, each target once: a random-access source.

    The context of a prediction is its row up to its position; the last row of a document is padded.
    Documents shorter than `min_tokens` (bos and eos included) are left out. Raises `DataError` when
    none is left, and, if `is_whole`, for a document longer than a row.
    """

    def __init__(
        self, records: TokenRecords, *, seq_len: int, min_tokens: int = 2, is_whole: bool = False
    ) -> None:
        self.records, self.seq_len = records, seq_len
        sizes = records.sizes
        if is_whole and sizes.max(initial=0) > seq_len + 1:
            raise DataError(
                f"{records.where} was prepared with --samples_are_rows and has a sample of "
                f"{sizes.max()} tokens: set seq_len to {sizes.max() - 1} or more (not {seq_len})"
            )
        self._kept = np.flatnonzero(sizes >= min_tokens)
        if not self._kept.size:
            raise DataError(
                f"none of {len(records)} documents has {min_tokens} tokens (longest: "
                f"{sizes.max(initial=0)}); lower min_tokens or add longer documents"
            )
        self._sizes = sizes[self._kept]
        self._ends = np.cumsum(-(-(self._sizes - 1) // seq_len))  # rows up to each document's end

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        document = np.searchsorted(self._ends, index, side="right")
        targets = int(self._sizes[document]) - 1
        num_rows = -(-targets // self.seq_len)
        start = int(index - self._ends[document] + num_rows) * self.seq_len
        size = min(self.seq_len, targets - start)
        return row_of(self.records, [(int(self._kept[document]), start, size)], self.seq_len)


def row_of(records: TokenRecords, pieces: Iterable[tuple[int, int, int]], seq_len: int) -> Row:
    """A row of (document, start, inputs) one after another, each a segment, the last input of each
    with its target; the rest is padded with the eos id in segment 0, outside the loss."""
    tokens, targets = np.full((2, seq_len + 1), records.eos_id, np.int32)
    segments, positions = np.zeros((2, seq_len), np.int32)
    begin = 0
    for number, (document, start, size) in enumerate(pieces, 1):
        end = begin + size
        ids = records.read(document, start, start + size + 1)
        tokens[begin : end + 1] = ids
        targets[begin:end] = ids[1:]
        segments[begin:end] = number
        positions[begin:end] = np.arange(size)
        begin = end
    return {
        "tokens": tokens[:-1],
        "targets": targets[:-1],
        "segment_ids": segments,
        "positions": positions,
        "loss_mask": segments > 0,
    }


# Rows of one kind, and the pieces in each of them: (length, how many).
Kind = tuple[int, list[tuple[int, int]]]


def plan_rows(histogram: np.ndarray, seq_len: int) -> list[Kind]:
    """The rows that best-fit decreasing makes of `histogram[n]` pieces of n tokens, 0 < n <= T.

    Ding et al. 2024, "Fewer Truncations Improve Language Modeling": the longest pieces are placed
    first, each into the row with the least room that holds it. Pieces of one length are
    interchangeable: time and size of the plan grow with T, not with the documents.
    """
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
    outside the loss: a random-access source. A document of more than T targets is cut into pieces
    of T and a rest, others are whole. `seed` permutes the pieces of one length.

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
