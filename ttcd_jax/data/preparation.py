"""Token records of a corpus, its documents streamed and tokenized by several processes.

While a folder is filled, its manifest has the format `UNFINISHED` and lists the documents that are
on disk. A later call reads the text again, but tokenizes the other documents only.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from ttcd_jax.config import differences
from ttcd_jax.data.corpus import SPLITS, Census, CorpusConfig, Split, empty_split, stream_documents
from ttcd_jax.data.documents import Document, LeftOut
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.records import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    TokenRecords,
    read_manifest,
    sealed,
    token_dtype,
)
from ttcd_jax.data.tokenizer import TokenizerConfig, build_tokenizer
from ttcd_jax.errors import DataError, UserError, listed
from ttcd_jax.files import sha256, write_json

SHARD_TOKENS = 2**28
UNFINISHED = "ttcd_jax unfinished token records 1"
LEFT_OUT = "left_out.json"  # the first lines without a document

_SAVE_SECONDS = 60.0
_BATCH_BYTES = 2**20
_LONG_BYTES = 2**24  # a batch of more is not copied to another process and back
_BATCHES_AHEAD = 4  # for each process


class _Batch(NamedTuple):
    """Documents of one split, and the census of the split up to the last of them."""

    split: Split
    documents: list[Document]
    num_bytes: int
    text: dict[str, Any]


class _Changed(Exception):
    """The reason why an unfinished folder is of no use."""


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
    """Fills `folder`, which is empty or unfinished, and returns its manifest; `on_progress` gets
    counts of new tokens, 0 while text is read again.

    The files do not depend on the number of processes, nor on the calls that it took to finish. In
    memory: some megabytes of text per process, and the longest document with its tokens. A shard
    has at most `shard_tokens` tokens, or one document. `samples_are_rows`: samples of token ids get
    no bos and eos, and each is a row of the run. Raises `DataError` for documents that cannot be
    read or tokenized, and for an empty corpus, `UserError` for a folder begun with other arguments.
    """
    if config.path is not None:
        build_tokenizer(config)  # an error names the user's file, not the copy
        config = config.replace(path=str(shutil.copyfile(config.path, folder / TOKENIZER)))
    facts = _tokenizer_facts(config)
    arguments = {
        "tokenizer": facts["tokenizer"],
        "shard_tokens": shard_tokens,
        "samples_are_rows": samples_are_rows,
        "corpus": {name: x for name, x in corpus.to_dict().items() if name != "path"},
    }
    unfinished = _Unfinished(folder, facts, arguments)

    def fill() -> LeftOut:
        left_out = LeftOut()
        documents: Iterable[tuple[Split, Document]] = stream_documents(corpus, left_out=left_out)
        if samples_are_rows:
            documents = ((split, document._replace(is_row=True)) for split, document in documents)
        batches = _batches(documents, unfinished.writers, on_progress)
        for batch, records in _encoded(batches, config, num_processes):
            unfinished.append(batch, records)
            on_progress(int(records.starts[-1]))
        return left_out

    try:
        unfinished.take_up()
        left_out = fill()
    except _Changed as change:
        logging.warning("%s cannot be continued (%s): begins again", folder, change)
        unfinished.clear()
        left_out = fill()
    if not unfinished.writers["train"].num_documents:
        raise empty_split(corpus, "train")
    extra: dict[str, Any] = {"samples_are_rows": True} if samples_are_rows else {}
    if left_out.num_lines:
        extra["lines_left_out"] = left_out.num_lines
        write_json(folder / LEFT_OUT, left_out.first)
    return unfinished.save(FORMAT, extra)


def stored_tokens(folder: Path) -> int:
    """Number of tokens that an unfinished folder keeps for the next call."""
    manifest = _stored(folder)
    return sum(x["num_tokens"] for x in manifest["splits"].values()) if manifest else 0


def _stored(folder: Path) -> dict[str, Any] | None:
    for kind in (UNFINISHED, FORMAT):  # a kill may come between the last manifest and the new name
        with contextlib.suppress(DataError):
            return read_manifest(folder, kind)
    return None


def _tokenizer_facts(config: TokenizerConfig) -> dict[str, Any]:
    tokenizer = build_tokenizer(config)
    return {
        "tokenizer": "byte" if config.path is None else sha256(Path(config.path)),
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "dtype": token_dtype(tokenizer.vocab_size).name,
    }


def _batches(
    documents: Iterable[tuple[Split, Document]],
    writers: dict[Split, "_SplitWriter"],
    on_progress: Callable[[int], None],
) -> Iterator[_Batch]:
    """Batches of about `_BATCH_BYTES` of the documents that are not yet stored, in order within the
    split. Raises `_Changed` if the others are not those that were stored."""
    lots: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)

    def batch(split: Split) -> _Batch:
        return _Batch(split, lots[split], sizes[split], writers[split].census.summary())

    for split, document in documents:
        writer = writers[split]
        writer.census.add(document)
        if writer.census.num_documents <= writer.num_documents:
            if writer.census.num_documents == writer.num_documents:
                writer.check_text()
            on_progress(0)
            continue
        lots[split].append(document)
        sizes[split] += len(document.content)
        if sizes[split] >= _BATCH_BYTES:
            yield batch(split)
            lots[split], sizes[split] = [], 0
    for writer in writers.values():
        if writer.census.num_documents < writer.num_documents:
            writer.check_text()
    yield from (batch(split) for split in SPLITS if lots[split])


def _encoded(
    batches: Iterator[_Batch], config: TokenizerConfig, num_processes: int
) -> Iterator[tuple[_Batch, TokenRecords]]:
    """The batches with their records, in their order."""
    tokenizer = build_tokenizer(config)
    if num_processes == 1:
        yield from ((batch, encode_documents(batch.documents, tokenizer)) for batch in batches)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), _end_with_parent
    )
    try:
        pending = collections.deque()
        for batch in batches:  # `pool.map` would read the whole corpus first
            is_long = batch.num_bytes > _LONG_BYTES
            while pending and (is_long or len(pending) >= _BATCHES_AHEAD * num_processes):
                first, future = pending.popleft()
                yield first, future.result()
            if is_long:
                yield batch, encode_documents(batch.documents, tokenizer)
            else:
                pending.append((batch, pool.submit(_encode_in_pool, config, batch.documents)))
        yield from ((batch, future.result()) for batch, future in pending)
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {num_processes} tokenizing processes was killed, perhaps out of memory; run "
            "again with fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer_of = functools.cache(build_tokenizer)


def _encode_in_pool(config: TokenizerConfig, documents: list[Document]) -> TokenRecords:
    return encode_documents(documents, _tokenizer_of(config))


def _end_with_parent() -> None:
    """Leaves Ctrl-C to the parent, and ends this process when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class _Unfinished:
    """The folder while it is filled: a writer for each split, and the manifest of what is stored.
    `arguments` are those that its continuation must have."""

    def __init__(self, folder: Path, facts: dict[str, Any], arguments: dict[str, Any]) -> None:
        self._folder, self._facts, self._arguments = folder, facts, arguments
        self._saved = time.monotonic()
        self.writers: dict[Split, _SplitWriter] = {}
        self._begin()

    def _begin(self) -> None:
        size, dtype = self._arguments["shard_tokens"], np.dtype(self._facts["dtype"])
        self.writers |= {split: _SplitWriter(self._folder, split, size, dtype) for split in SPLITS}

    def take_up(self) -> None:
        """Goes back to what the manifest lists. Raises `_Changed` for another content."""
        manifest = _stored(self._folder)
        if manifest is None:
            return
        names = ("tokenizer", "samples_are_rows")
        old = manifest.get("arguments") or {x: manifest.get(x, False) for x in names}
        if changed := differences(old, {name: self._arguments[name] for name in old}):
            raise UserError(
                f"{self._folder} was begun with other arguments ({listed(changed)}): repeat those, "
                f"or remove it (rm -r {self._folder})"
            )
        self._remove_all_but(MANIFEST, TOKENIZER, *manifest["files"])
        for split, facts in manifest["splits"].items():
            self.writers[split].take_up(facts, manifest["files"])

    def clear(self) -> None:
        """Begins again with the first document."""
        self._remove_all_but(TOKENIZER)
        self._begin()

    def _remove_all_but(self, *names: str) -> None:
        for path in self._folder.iterdir():
            if path.name not in names:
                path.unlink()

    def append(self, batch: _Batch, records: TokenRecords) -> None:
        """Appends the records of a batch; those before are listed when they fill a shard."""
        writer = self.writers[batch.split]
        num_shards = writer.num_shards
        writer.append(records, batch.text)
        is_late = time.monotonic() - self._saved > _SAVE_SECONDS
        if is_late or writer.num_shards > num_shards > 0:
            self.save(UNFINISHED, {"arguments": self._arguments})

    def save(self, kind: str, extra: dict[str, Any]) -> dict[str, Any]:
        """Writes the manifest of all that is stored, which is on disk before."""
        written = [writer for writer in self.writers.values() if writer.num_documents]
        facts: dict[str, Any] = {"format": kind} | self._facts
        facts["splits"] = {writer.split: writer.facts() for writer in written}
        facts["files"] = {name: x for writer in written for name, x in writer.files().items()}
        manifest = sealed(facts | extra)
        write_json(self._folder / MANIFEST, manifest)
        self._saved = time.monotonic()
        return manifest


class _SplitWriter:
    """A writer of the shards and the starts of one split. `text`: the census of what is stored."""

    def __init__(self, folder: Path, split: Split, shard_tokens: int, dtype: np.dtype) -> None:
        self.split: Split = split
        self._folder, self._shard_tokens, self._dtype = folder, shard_tokens, dtype
        self._starts = _File(folder / f"{split}.starts.bin")
        self._shards: list[_File] = []
        self._room = self._num_tokens = self.num_documents = 0
        self.census, self.text = Census(), Census().summary()

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def take_up(self, facts: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
        """Goes back to the entries of the split and of its files in a manifest."""
        self._num_tokens, self.num_documents = facts["num_tokens"], facts["num_documents"]
        self.text = facts["text"]
        self._shards = [_File(self._folder / name) for name in facts["shards"]]
        for file in (self._starts, *self._shards):
            file.take_up(**files[file.path.name])
        last = self._shards[-1].num_bytes // self._dtype.itemsize
        self._room = max(0, self._shard_tokens - last)

    def check_text(self) -> None:
        """Raises `_Changed` unless the text that was read is what is stored."""
        if self.census.summary() != self.text:
            raise _Changed(f"the first {self.num_documents:,} documents of {self.split} changed")

    def append(self, records: TokenRecords, text: dict[str, Any]) -> None:
        """Appends the documents; one that does not fit into the last shard begins a new one."""
        (ids,), starts = records.shards, records.starts
        new = starts[1:] if self.num_documents else starts  # the first is stored as the last end
        self._starts.append((self._num_tokens + new).astype("<u8"))
        begin = 0
        while begin < len(records):
            end = int(np.searchsorted(starts, starts[begin] + self._room, side="right")) - 1
            if end <= begin:
                self._room = max(self._shard_tokens, int(starts[begin + 1] - starts[begin]))
                name = f"{self.split}.{len(self._shards):05}.tokens.bin"
                self._shards.append(_File(self._folder / name))
                continue
            self._shards[-1].append(ids[starts[begin] : starts[end]])
            self._room -= int(starts[end] - starts[begin])
            begin = end
        self._num_tokens += int(starts[-1])
        self.num_documents += len(records)
        self.text = text

    def facts(self) -> dict[str, Any]:
        """The entry of the split in the manifest."""
        return {
            "num_documents": self.num_documents,
            "num_tokens": self._num_tokens,
            "starts": self._starts.path.name,
            "shards": [shard.path.name for shard in self._shards],
            "text": self.text,
        }

    def files(self) -> dict[str, dict[str, Any]]:
        """Size and sha256 of each file; all are on disk when this returns."""
        return {file.path.name: file.flushed() for file in (self._starts, *self._shards)}


class _File:
    """A file that grows, with its size and digest."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_bytes = path, 0
        self._digest, self._is_flushed = hashlib.sha256(), True

    def take_up(self, num_bytes: int, sha256: str) -> None:
        """Cuts what is behind the first `num_bytes`. Raises `_Changed` for another digest."""
        try:
            with self.path.open("rb+") as file:
                file.truncate(num_bytes)
                self._digest = hashlib.file_digest(file, "sha256")
        except FileNotFoundError as error:
            raise _Changed(f"{self.path.name} is missing") from error
        if self._digest.hexdigest() != sha256:
            raise _Changed(f"{self.path.name} changed")
        self.num_bytes, self._is_flushed = num_bytes, False

    def append(self, values: np.ndarray) -> None:
        with self.path.open("ab") as file:
            values.tofile(file)
        self._digest.update(values)
        self.num_bytes += values.nbytes
        self._is_flushed = False

    def flushed(self) -> dict[str, Any]:
        """Size and sha256, once the content is on disk."""
        if not self._is_flushed:
            with self.path.open("rb") as file:
                os.fsync(file)
        self._is_flushed = True
        return {"num_bytes": self.num_bytes, "sha256": self._digest.hexdigest()}
