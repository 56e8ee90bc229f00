"""Documents as token ids, in memory or memory-mapped; their rows of T tokens, by index: packed for
training, cut at the ends of rows or best-fit where they are not; one per row for evaluation.

A document becomes bos + tokens + eos. A row is a dict of arrays [T]:

    tokens       int32   inputs
    targets      int32   the token after each input
    segment_ids  int32   1, 2, ... : the document of the row that the input belongs to (0: padding);
                         absent where every row is one document
    positions    int32   position of the input in its document's part of the row
    loss_mask    bool    whether the target counts in the loss
"""

import bisect
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import grain
import numpy as np

from ttcd_jax.data.documents import Document
from ttcd_jax.data.tokenizer import ByteTokenizer, Tokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.tokens import check_tokens

Row = dict[str, np.ndarray]
_Part = tuple[Document, int, int]  # of a document, from and to so many bytes
AGAIN = "copy it again, or prepare it anew (ttcd prepare)"


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file of ids: a plain array, since slices of a memmap cost numpy more."""
    return np.asarray(np.memmap(path, dtype, "r"))


@dataclasses.dataclass(frozen=True, eq=False)
class TokenRecords:
    """Tokenized documents: `shards` of ids [tokens], and int64 `starts` [documents + 1], the offset
    of each document in the concatenated shards, and the end. `where` names them in errors, `files`
    are those of memory-mapped shards, with their sizes. `samples_are_rows`: every document is one
    whole row. `num_files`: of the text, if it was read from files just now."""

    shards: Sequence[np.ndarray]
    starts: np.ndarray
    _: dataclasses.KW_ONLY
    eos_id: int
    where: str = "the corpus"
    files: Sequence[tuple[Path, int]] = ()
    samples_are_rows: bool = False
    num_files: int | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([shard.size for shard in self.shards])

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each document, bos and eos included, int64 [documents]."""
        return np.diff(self.starts)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which maps the files itself."""
        return vars(self) | {"shards": [x.dtype if self.files else x for x in self.shards]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        paths, shards = (path for path, _ in state["files"]), state["shards"]
        vars(self).update(state, shards=[*map(mapped, paths, shards)] or shards)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Ids [stop - start] of the tokens `start` to `stop` of a document. Raises `DataError` for
        a mapped file that was cut: reading it would kill the process."""
        first = self.starts[document]
        shard = np.searchsorted(self._ends, first, side="right")
        if self.files:
            path, num_bytes = self.files[shard]
            with contextlib.suppress(FileNotFoundError):  # unlinked: the mapping has its content
                if (size := path.stat().st_size) < num_bytes:
                    raise DataError(f"{path} was cut to {size} of {num_bytes} bytes; {AGAIN}")
        offset = first - self._ends[shard] + self.shards[shard].size
        return self.shards[shard][offset + start : offset + stop]


def encode_documents(
    documents: list[Document], tokenizer: Tokenizer, samples_are_rows: bool = False
) -> TokenRecords:
    """The documents as token records in memory, each as bos + tokens + eos, or with
    `samples_are_rows` as its own token ids. Raises `DataError` naming a document that is not UTF-8
    (with a `tokenizer.json`) or has ids outside the tokenizer's vocabulary."""
    dtype, ids, starts = token_dtype(tokenizer.vocab_size), bytearray(), [0]
    parts = [(x, *span) for x in documents for span in pairwise(tokenizer.cuts(x.text))]
    encoded = _encoded(partial(_encode, tokenizer, samples_are_rows), parts)
    for (document, _, stop), part in zip(parts, encoded, strict=True):
        ids += part.data
        if stop == len(document.text):
            starts.append(len(ids) // dtype.itemsize)
    return TokenRecords(
        [np.frombuffer(ids, dtype)],
        np.array(starts),
        eos_id=tokenizer.eos_id,
        num_files=len({re.sub(r":\d+$", "", document.name) for document in documents}),
    )


def _encoded(encode: partial[np.ndarray], parts: list[_Part]) -> Iterator[np.ndarray]:
    """The ids of the parts in their order, by a thread per core where that is faster: a worker of
    `prepare_records` is one of many, and bytes are copied. Long parts would take the memory."""
    is_alone = isinstance(encode.args[0], ByteTokenizer) or multiprocessing.parent_process()
    if is_alone or any(stop - start > 2**20 for _, start, stop in parts):
        yield from map(encode, parts)
        return
    ahead = grain.ReadOptions(cores := len(os.sched_getaffinity(0)), 2 * cores)
    dataset: Any = grain.MapDataset.source(parts).map(encode).to_iter_dataset(ahead)
    with contextlib.closing(iter(dataset)) as encoded:
        yield from encoded


def _encode(tokenizer: Tokenizer, is_row: bool, part: _Part) -> np.ndarray:
    """The ids of a part of a document, with bos where it begins and eos where it ends."""
    document, start, stop = part
    bos, eos, ids = [tokenizer.bos_id], [tokenizer.eos_id], document.tokens
    has_bos, has_eos = start > 0, stop < len(document.text)
    try:
        if ids is not None:
            check_tokens(ids, tokenizer.vocab_size)
            has_bos, has_eos = is_row or ids[:1].tolist() == bos, is_row or ids[-1:].tolist() == eos
        elif is_row:
            raise DataError("this is text, and a sample that is a row has token ids")
        else:
            ids = tokenizer.encode_part(document.text, start, stop)
    except DataError as error:
        raise DataError(f"{document.name}: {error}") from error
    framed = [] if has_bos else bos, ids, [] if has_eos else eos
    return np.concatenate(framed, dtype=token_dtype(tokenizer.vocab_size), casting="unsafe")


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
        start = range(len(self))[index] * self.seq_len
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
    """Documents cut into pieces of T targets and a rest, a piece in each row, which is the context
    of its predictions, and is padded: a random-access source, with every target once.

    Documents shorter than `min_tokens` (bos and eos included) are left out. Raises `DataError` when
    none is left, and, if `is_whole`, for a document longer than a row. In memory: `_before`
    [documents + 1], the pieces before each document.
    """

    def __init__(
        self, records: TokenRecords, *, seq_len: int, min_tokens: int = 2, is_whole: bool = False
    ) -> None:
        self.records, self.seq_len = records, seq_len
        sizes = records.sizes
        longest = sizes.max(initial=0)
        if is_whole and longest > seq_len + 1:
            raise DataError(
                f"{records.where} was prepared with --samples_are_rows and has a sample of "
                f"{longest} tokens: set seq_len to {longest - 1} or more (not {seq_len})"
            )
        targets = np.where(sizes >= min_tokens, sizes - 1, 0)
        self._before = np.concatenate([[0], np.cumsum(-(-targets // seq_len))])
        if not self._before[-1]:
            raise DataError(
                f"none of {len(records)} documents of {records.where} has {min_tokens} tokens "
                f"(longest: {longest}); add longer documents"
            )

    def __len__(self) -> int:
        return int(self._before[-1])

    def _pieces(self, index: int) -> Iterable[int]:
        """The numbers of the pieces in a row."""
        return [index]

    def __getitem__(self, index: int) -> Row:
        """The pieces one after another, each a segment, the last input of each with its target; the
        rest is padded with the eos id in segment 0, outside the loss."""
        tokens, targets = np.full((2, self.seq_len + 1), self.records.eos_id, np.int32)
        segments, positions = np.zeros((2, self.seq_len), np.int32)
        begin = 0
        for segment, piece in enumerate(self._pieces(range(len(self))[index]), 1):
            document = int(np.searchsorted(self._before, piece, side="right")) - 1
            start = int(piece - self._before[document]) * self.seq_len
            first, last = self.records.starts[document : document + 2]
            ids = self.records.read(document, start, min(start + self.seq_len + 1, last - first))
            end = begin + ids.size - 1
            tokens[begin : end + 1] = ids
            targets[begin:end] = ids[1:]
            segments[begin:end] = segment
            positions[begin:end] = np.arange(end - begin)
            begin = end
        return {
            "tokens": tokens[:-1],
            "targets": targets[:-1],
            "segment_ids": segments,
            "positions": positions,
            "loss_mask": segments > 0,
        }


# Room in each row of one kind, their number, and the pieces in each: (length, how many).
Kind = tuple[int, int, list[tuple[int, int]]]


def plan_rows(histogram: np.ndarray, seq_len: int) -> list[Kind]:
    """The rows that best-fit decreasing (Ding et al. 2024, "Fewer Truncations Improve Language
    Modeling") makes of `histogram[n]` pieces of n tokens, 0 < n <= T: the longest first, each into
    the row with the least room that holds it. Time and size of the plan grow with T, not with the
    documents."""
    kinds: list[Kind] = []  # the least room comes last

    def add(room: int, num_rows: int, pieces: list[tuple[int, int]]) -> None:
        if num_rows:
            bisect.insort(kinds, (room, num_rows, pieces), key=lambda kind: -kind[0])

    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            index = bisect.bisect_right(kinds, -length, key=lambda kind: -kind[0]) - 1
            new = seq_len, -(-left // (seq_len // length)), []
            room, num_rows, pieces = new if index < 0 else kinds.pop(index)
            fit = room // length  # a row that took a piece has the least room for the next
            full = min(num_rows, left // fit)
            rest = left - full * fit if full < num_rows else 0
            add(room - fit * length, full, [*pieces, (length, fit)])
            add(room - rest * length, min(rest, 1), [*pieces, (length, rest)])
            add(room, num_rows - full - min(rest, 1), pieces)
            left -= full * fit + rest
    return sorted(kinds, key=lambda kind: kind[0])


class BestFitRows(DocumentRows):
    """The pieces in rows planned by `plan_rows`: a document is cut only if it is longer than a row.
    `seed` permutes the pieces of one length. In memory also: `_order` [pieces], by length; the
    plan."""

    def __init__(self, records: TokenRecords, *, seq_len: int, seed: int) -> None:
        super().__init__(records, seq_len=seq_len)
        targets = records.sizes - 1
        lengths = np.full(self._before[-1], seq_len, np.min_scalar_type(seq_len))
        lengths[self._before[1:][targets > 0] - 1] = (targets[targets > 0] - 1) % seq_len + 1
        order = np.random.default_rng(seed).permutation(lengths.size)
        self._order = order[np.argsort(lengths[order], kind="stable")]
        histogram = np.bincount(lengths)
        firsts = np.cumsum(histogram) - histogram  # the next piece of each length in _order
        self._starts, self._kinds = [0], []
        for _, num_rows, pieces in plan_rows(histogram, seq_len):
            self._kinds.append([(firsts[length], count) for length, count in pieces])
            for length, count in pieces:
                firsts[length] += num_rows * count
            self._starts.append(self._starts[-1] + num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def _pieces(self, index: int) -> Iterator[int]:
        kind = bisect.bisect_right(self._starts, index) - 1
        number = index - self._starts[kind]
        for first, count in self._kinds[kind]:
            yield from self._order[first + number * count : first + (number + 1) * count]
