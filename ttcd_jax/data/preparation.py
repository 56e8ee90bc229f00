"""Token records of a corpus, its documents streamed and tokenized by several processes."""

import collections
import concurrent.futures
import functools
import multiprocessing
import operator
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from ttcd_jax.data.corpus import SPLITS, Census, CorpusConfig, Split, empty_split, stream_documents
from ttcd_jax.data.documents import Document, LeftOut
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.records import FORMAT, MANIFEST, TOKENIZER, TokenRecords, sealed, token_dtype
from ttcd_jax.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from ttcd_jax.errors import UserError
from ttcd_jax.files import sha256, write_json

SHARD_TOKENS = 2**28

_BATCH_BYTES = 2**20
_BATCHES_AHEAD = 4  # for each process

Batch = tuple[Split, list[Document]]


def prepare_records(
    corpus: CorpusConfig,
    config: TokenizerConfig,
    folder: Path,
    *,
    num_processes: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    samples_are_rows: bool = False,
    on_progress: Callable[[int], None] = lambda num_tokens: None,
) -> dict[str, Any]:
    """Fills the empty `folder` and returns its manifest; `on_progress` gets counts of new tokens.

    The files do not depend on the number of processes. In memory: some megabytes of text per
    process, and the longest document. A shard has at most `shard_tokens` tokens, or one document.
    `samples_are_rows`: samples of token ids get no bos and eos, and each is a row of the run.
    Raises `DataError` for documents that cannot be read or tokenized, and for an empty corpus.
    """
    if config.path is not None:
        build_tokenizer(config)  # an error names the user's file, not the copy
        config = config.replace(path=str(shutil.copyfile(config.path, folder / TOKENIZER)))
    writers: dict[Split, _SplitWriter]
    writers = {split: _SplitWriter(folder, split, shard_tokens) for split in SPLITS}
    left_out = LeftOut()
    documents: Iterable[tuple[Split, Document]] = stream_documents(corpus, left_out=left_out)
    if samples_are_rows:
        documents = ((split, document._replace(is_row=True)) for split, document in documents)
    for split, records in _encoded(_batches(documents, writers), config, num_processes):
        writers[split].append(records)
        on_progress(int(records.starts[-1]))
    if not writers["train"].num_documents:
        raise empty_split(corpus, "train")
    written = {split: writer for split, writer in writers.items() if writer.num_documents}
    splits = {split: writer.facts() for split, writer in written.items()}
    files = {name: facts for w in written.values() for name, facts in w.files().items()}
    facts = _tokenizer_facts(config) | {"splits": splits, "files": files}
    if samples_are_rows:
        facts["samples_are_rows"] = True
    if left_out.num_lines:
        facts["lines_left_out"] = left_out.num_lines
    manifest = sealed(facts)
    write_json(folder / MANIFEST, manifest)
    return manifest


def _tokenizer_facts(config: TokenizerConfig) -> dict[str, Any]:
    tokenizer = build_tokenizer(config)
    return {
        "format": FORMAT,
        "tokenizer": "byte" if config.path is None else sha256(Path(config.path)),
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "dtype": token_dtype(tokenizer.vocab_size).name,
    }


def _batches(
    documents: Iterable[tuple[Split, Document]], writers: dict[Split, "_SplitWriter"]
) -> Iterator[Batch]:
    """Batches of about `_BATCH_BYTES` of documents of one split, in order within the split; every
    document is added to the census of its split's writer."""
    lots: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for split, document in documents:
        writers[split].census.add(document)
        lots[split].append(document)
        sizes[split] += len(document.content)
        if sizes[split] >= _BATCH_BYTES:
            yield split, lots[split]
            lots[split], sizes[split] = [], 0
    yield from filter(operator.itemgetter(1), lots.items())


def _encoded(
    batches: Iterator[Batch], config: TokenizerConfig, num_processes: int
) -> Iterator[tuple[Split, TokenRecords]]:
    """The batches as records, in their order."""
    if num_processes == 1:
        tokenizer = build_tokenizer(config)
        yield from (_encode(tokenizer, batch) for batch in batches)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), _end_with_parent
    )
    try:
        pending = collections.deque()
        for batch in batches:  # `pool.map` would read the whole corpus first
            pending.append(pool.submit(_encode_in_pool, config, batch))
            if len(pending) > _BATCHES_AHEAD * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {num_processes} tokenizing processes was killed, perhaps out of memory; run "
            "again with fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer_of = functools.cache(build_tokenizer)


def _encode_in_pool(config: TokenizerConfig, batch: Batch) -> tuple[Split, TokenRecords]:
    return _encode(_tokenizer_of(config), batch)


def _encode(tokenizer: Tokenizer, batch: Batch) -> tuple[Split, TokenRecords]:
    split, documents = batch
    return split, encode_documents(documents, tokenizer)


def _end_with_parent() -> None:
    """Leaves Ctrl-C to the parent, and ends this process when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class _SplitWriter:
    """A writer of the shards and the starts of one split."""

    def __init__(self, folder: Path, split: Split, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._starts = folder / f"{split}.starts.bin"
        self._shards: list[Path] = []
        self._room = self._num_tokens = self.num_documents = 0
        self.census = Census()  # of the text that was tokenized

    def append(self, records: TokenRecords) -> None:
        """Appends the documents; one that does not fit into the last shard begins a new one."""
        (ids,), starts = records.shards, records.starts
        new = starts[1:] if self.num_documents else starts  # the first is stored as the last end
        _append(self._starts, (self._num_tokens + new).astype("<u8"))
        begin = 0
        while begin < len(records):
            end = int(np.searchsorted(starts, starts[begin] + self._room, side="right")) - 1
            if end <= begin:
                self._room = max(self._shard_tokens, int(starts[begin + 1] - starts[begin]))
                name = f"{self._split}.{len(self._shards):05}.tokens.bin"
                self._shards.append(self._folder / name)
                continue
            _append(self._shards[-1], ids[starts[begin] : starts[end]])
            self._room -= int(starts[end] - starts[begin])
            begin = end
        self._num_tokens += int(starts[-1])
        self.num_documents += len(records)

    def facts(self) -> dict[str, Any]:
        """The entry of the split in the manifest."""
        return {
            "num_documents": self.num_documents,
            "num_tokens": self._num_tokens,
            "starts": self._starts.name,
            "shards": [shard.name for shard in self._shards],
            "text": self.census.summary(),
        }

    def files(self) -> dict[str, dict[str, Any]]:
        """Size and sha256 of each file; all are on disk when this returns."""
        facts = {}
        for path in (self._starts, *self._shards):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            facts[path.name] = {"num_bytes": path.stat().st_size, "sha256": sha256(path)}
        return facts


def _append(path: Path, values: np.ndarray) -> None:
    with path.open("ab") as file:
        values.tofile(file)
