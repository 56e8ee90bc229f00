"""Documents as rows of T tokens, by index: packed for training, one per row for evaluation.

A document becomes bos + tokens + eos. A row is a dict of arrays [T]:

    tokens       int32   inputs
    targets      int32   the token after each input
    segment_ids  int32   1, 2, ... : the document of the row that the input belongs to (0: padding);
                         absent where every row is one document
    positions    int32   position of the input in its document's part of the row
    loss_mask    bool    whether the target counts in the loss
"""

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


def encode_documents(documents: list[Document], tokenizer: Tokenizer) -> TokenRecords:
    """The documents as token records in memory. Raises `DataError` naming a document that is not
    UTF-8 (with a `tokenizer.json`) or has ids outside the tokenizer's vocabulary."""
    dtype, ids, starts = token_dtype(tokenizer.vocab_size), bytearray(), [0]
    for document in documents:
        try:
            for part in _encode(document, tokenizer):
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


def _encode(document: Document, tokenizer: Tokenizer) -> Iterator[ArrayLike]:
    bos, eos, ids = [tokenizer.bos_id], [tokenizer.eos_id], document.tokens
    if ids is None:
        if document.is_row:
            raise DataError("this is text, and a sample that is a row has token ids")
        yield bos
        yield from tokenizer.encode_pieces(document.text)
        yield eos
        return
    check_tokens(ids, tokenizer.vocab_size)
    yield [] if document.is_row or ids[:1].tolist() == bos else bos
    yield ids
    yield [] if document.is_row or ids[-1:].tolist() == eos else eos


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
