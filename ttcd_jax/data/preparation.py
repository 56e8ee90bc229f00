"""A corpus as a folder of token records: documents streamed, tokenized by several processes."""

import collections
import concurrent.futures
import functools
import hashlib
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
from ttcd_jax.data.documents import Document
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.records import FORMAT, MANIFEST, TOKENIZER, TokenRecords, sealed, token_dtype
from ttcd_jax.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from ttcd_jax.errors import UserError
from ttcd_jax.files import write_json

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
    on_progress: Callable[[int], None] = lambda num_tokens: None,
) -> dict[str, Any]:
    """Fills the empty `folder`, and returns its manifest; `on_progress` gets counts of new tokens.

    The files are the same for every number of processes. In memory: some megabytes of text for each
    process, and the longest document. A shard has `shard_tokens` at most, or one document.
    Raises `DataError` for documents that cannot be read or tokenized, and for an empty corpus.
    """
    config = _with_own_copy(config, folder)
    writers: dict[Split, _SplitWriter]
    writers = {split: _SplitWriter(folder, split, shard_tokens) for split in SPLITS}
    documents = _counted(stream_documents(corpus), writers)
    for split, records in _encoded(_batches(documents), config, num_processes):
        writers[split].append(records)
        on_progress(int(records.starts[-1]))
    if not writers["train"].num_documents:
        raise empty_split(corpus, "train")
    written = {split: writer for split, writer in writers.items() if writer.num_documents}
    splits = {split: writer.facts() for split, writer in written.items()}
    files = {name: facts for w in written.values() for name, facts in w.files().items()}
    manifest = sealed(_tokenizer_facts(config) | {"splits": splits, "files": files})
    write_json(folder / MANIFEST, manifest)
    return manifest


def _with_own_copy(config: TokenizerConfig, folder: Path) -> TokenizerConfig:
    if config.path is None:
        return config
    build_tokenizer(config)  # an error names the user's file, not the copy
    return config.replace(path=str(shutil.copyfile(config.path, folder / TOKENIZER)))


def _tokenizer_facts(config: TokenizerConfig) -> dict[str, Any]:
    tokenizer = build_tokenizer(config)
    source = None if config.path is None else Path(config.path).read_bytes()
    return {
        "format": FORMAT,
        "tokenizer": "byte" if source is None else hashlib.sha256(source).hexdigest(),
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "dtype": token_dtype(tokenizer.vocab_size).name,
    }


def _counted(
    documents: Iterable[tuple[Split, Document]], writers: dict[Split, "_SplitWriter"]
) -> Iterator[tuple[Split, Document]]:
    for split, document in documents:
        writers[split].census.add(document)
        yield split, document


def _batches(documents: Iterable[tuple[Split, Document]]) -> Iterator[Batch]:
    """Documents of one split in lots of about `_BATCH_BYTES`, in their order within the split."""
    lots: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for split, document in documents:
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
        for batch in batches:  # the pool itself would read the whole corpus ahead
            pending.append(pool.submit(_encode_in_pool, config, batch))
            if len(pending) > _BATCHES_AHEAD * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {num_processes} tokenizing processes was killed, for want of memory perhaps; "
            "run again with fewer --processes"
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
    """Ctrl-C is the parent's matter; one that is killed takes this process along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class _SplitWriter:
    """The shards and the starts of one split."""

    def __init__(self, folder: Path, split: Split, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._starts = _DigestedFile(folder / f"{split}.starts.bin")
        self._shards: list[_DigestedFile] = []
        self._room = self._num_tokens = self.num_documents = 0
        self.census = Census()  # of the text that was tokenized

    def append(self, records: TokenRecords) -> None:
        """A document that does not fit into the last shard begins another."""
        (ids,), starts = records.shards, records.starts
        known = 1 if self.num_documents else 0  # the end of what was there is the first start
        self._starts.write((self._num_tokens + starts[known:]).astype("<u8"))
        begin = 0
        while begin < len(records):
            end = int(np.searchsorted(starts, starts[begin] + self._room, side="right")) - 1
            if end <= begin:
                self._room = max(self._shard_tokens, int(starts[begin + 1] - starts[begin]))
                name = f"{self._split}.{len(self._shards):05}.tokens.bin"
                self._shards.append(_DigestedFile(self._folder / name))
                continue
            self._shards[-1].write(ids[starts[begin] : starts[end]])
            self._room -= int(starts[end] - starts[begin])
            begin = end
        self._num_tokens += int(starts[-1])
        self.num_documents += len(records)

    def facts(self) -> dict[str, Any]:
        """The manifest's entry of the split."""
        return {
            "num_documents": self.num_documents,
            "num_tokens": self._num_tokens,
            "starts": self._starts.name,
            "shards": [shard.name for shard in self._shards],
            "text": self.census.summary(),
        }

    def files(self) -> dict[str, dict[str, Any]]:
        """Size and sha256 of each file; all are on disk when this returns."""
        return {file.name: file.finish() for file in (self._starts, *self._shards)}


class _DigestedFile:
    """A file that takes the sha256 of what it is given. Open only while it is written to."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, values: np.ndarray) -> None:
        data = values.tobytes()
        with self._path.open("ab") as file:
            self._num_bytes += file.write(data)
        self._digest.update(data)

    def finish(self) -> dict[str, Any]:
        with self._path.open("ab") as file:
            os.fsync(file.fileno())
        return {"num_bytes": self._num_bytes, "sha256": self._digest.hexdigest()}
