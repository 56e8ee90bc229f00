"""Documents as rows of T tokens, addressed by index: packed for training, apart for evaluation.

A document becomes bos + tokens + eos. A row is a dict of arrays [T]:

    tokens       int32   inputs
    targets      int32   the token after each input
    segment_ids  int32   1, 2, ... : which of the row's documents the input belongs to (0: padding)
    positions    int32   place of the input within its document's part of the row
    loss_mask    bool    whether the target counts
"""

import numpy as np

from ttcd_jax.data.corpus import Document
from ttcd_jax.data.tokenizer import Tokenizer
from ttcd_jax.errors import DataError

Row = dict[str, np.ndarray]


def _encode(document: Document, tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([[tokenizer.bos_id], tokenizer.encode(document.text), [tokenizer.eos_id]])


class PackedRows:
    """All documents, permuted by `seed`, as one stream cut into rows: a random-access source.

    Row r reads the stream at [r*T, r*T + T], T + 1 tokens of which the last is only a target; what
    does not fill a row is dropped. `loss_mask` is False where the target opens another document.
    `stream` [tokens] and `starts` [documents] hold the tokens and where each document begins.
    Raises `DataError` when the stream does not fill one row.
    """

    def __init__(
        self, documents: list[Document], tokenizer: Tokenizer, *, seq_len: int, seed: int
    ) -> None:
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        order = np.random.default_rng(seed).permutation(len(documents))
        parts = [_encode(documents[i], tokenizer).astype(dtype) for i in order]
        sizes = np.array([part.size for part in parts], np.int64)
        self.seq_len = seq_len
        self.starts = np.cumsum(sizes) - sizes
        if sizes.sum() < seq_len + 1:
            raise DataError(
                f"the corpus has {sizes.sum()} tokens and a row takes {seq_len + 1} "
                f"(seq_len {seq_len} and a target); add text or lower seq_len"
            )
        self.stream = np.concatenate(parts)

    def __len__(self) -> int:
        return (self.stream.size - 1) // self.seq_len

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = index * self.seq_len
        places = np.arange(start, start + self.seq_len + 1)
        tokens = self.stream[start : places[-1] + 1].astype(np.int32)
        document = np.searchsorted(self.starts, places, side="right") - 1
        begin = np.maximum(self.starts[document], start)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segment_ids": (document - document[0] + 1)[:-1].astype(np.int32),
            "positions": (places - begin)[:-1].astype(np.int32),
            "loss_mask": document[1:] == document[:-1],
        }


def document_rows(
    documents: list[Document], tokenizer: Tokenizer, *, seq_len: int, min_tokens: int = 2
) -> Row:
    """Every document cut into consecutive rows of its own, each target once: arrays [rows, T].

    A position in a row is the length of the context its prediction could use. The last row of a
    document is padded with the eos id in segment 0, outside the loss. Documents shorter than
    `min_tokens` (bos and eos included) are left out; `DataError` when none is left.
    """
    encoded = [_encode(document, tokenizer) for document in documents]
    kept = [ids for ids in encoded if ids.size >= min_tokens]
    if not kept:
        longest = max((ids.size for ids in encoded), default=0)
        raise DataError(
            f"none of {len(documents)} documents has {min_tokens} tokens (longest: {longest}); "
            "lower min_tokens or add longer documents"
        )
    pieces = [
        ids[start : start + seq_len + 1]
        for ids in kept
        for start in range(0, ids.size - 1, seq_len)
    ]
    padded = np.full((len(pieces), seq_len + 1), tokenizer.eos_id, np.int32)
    for row, ids in zip(padded, pieces, strict=True):
        row[: ids.size] = ids
    num_inputs = np.array([ids.size - 1 for ids in pieces])
    places = np.arange(seq_len, dtype=np.int32)
    is_real = places < num_inputs[:, None]
    return {
        "tokens": padded[:, :-1],
        "targets": padded[:, 1:],
        "segment_ids": is_real.astype(np.int32),
        "positions": np.where(is_real, places, 0),
        "loss_mask": is_real,
    }
