"""Token records of a corpus, its documents streamed and tokenized by several processes.

While a folder is filled, its manifest has the format `UNFINISHED` and lists what is on disk. A
later call reads all text again, but tokenizes only the other documents.
"""

import collections
import concurrent.futures
import contextlib
import functools
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
from ttcd_jax.files import difference, sha256, write_json

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

    The files depend neither on the number of processes nor on that of the calls it took. In memory:
    some megabytes of text per process, and the longest document with its tokens. A shard has at
    most `shard_tokens` tokens, or one document. `samples_are_rows`: samples of token ids get no bos
    and eos, and each is a row of the run. Raises `DataError` for documents that cannot be read or
    tokenized, for an empty corpus, and where the text or the arguments of an unfinished folder
    changed.
    """
    if config.path is not None:
        build_tokenizer(config)  # an error names the user's file, not the copy
        config = config.replace(path=str(shutil.copyfile(config.path, folder / TOKENIZER)))
    facts = _tokenizer_facts(config)
    arguments = {
        "tokenizer": facts["tokenizer"],
        "samples_are_rows": samples_are_rows,
        "shard_tokens": shard_tokens,
        "corpus": corpus.to_dict() | {"path": None},  # its content is compared
    }
    writers: dict[Split, _SplitWriter]
    writers = {split: _SplitWriter(folder, split, shard_tokens) for split in SPLITS}
    _take_up(folder, arguments, writers)
    left_out, saved = LeftOut(), time.monotonic()
    documents: Iterable[tuple[Split, Document]] = stream_documents(corpus, left_out=left_out)
    if samples_are_rows:
        documents = ((split, document._replace(is_row=True)) for split, document in documents)
    batches = _batches(documents, writers, on_progress)
    for batch, records in _encoded(batches, config, num_processes):
        has_filled_one = writers[batch.split].append(records, batch.text)
        on_progress(int(records.starts[-1]))
        if has_filled_one or time.monotonic() - saved > _SAVE_SECONDS:
            _save(folder, writers, {"format": UNFINISHED} | facts, arguments)
            saved = time.monotonic()
    if not writers["train"].num_documents:
        raise empty_split(corpus, "train")
    extra: dict[str, Any] = {"samples_are_rows": True} if samples_are_rows else {}
    if left_out.num_lines:
        extra["lines_left_out"] = left_out.num_lines
        write_json(folder / LEFT_OUT, left_out.first)
    return _save(folder, writers, {"format": FORMAT} | facts, extra)


def stored_tokens(folder: Path) -> int:
    """Number of tokens that an unfinished folder keeps for the next call."""
    return sum(facts["num_tokens"] for facts in _stored(folder).get("splits", {}).values())


def _stored(folder: Path) -> dict[str, Any]:
    """The manifest of an unfinished folder, or of one that was killed before it got its name."""
    for kind in (UNFINISHED, FORMAT):
        with contextlib.suppress(DataError):
            return read_manifest(folder, kind)
    return {}


def _take_up(folder: Path, arguments: dict[str, Any], writers: dict[Split, "_SplitWriter"]) -> None:
    """Goes back to what the manifest lists."""
    if not (manifest := _stored(folder)):
        return
    old = {name: manifest[name] for name in arguments if name in manifest}
    if changed := differences(arguments | {"samples_are_rows": False} | old, arguments):
        raise _no_continuation(folder, listed(changed))
    for path in folder.iterdir():
        if path.name not in (MANIFEST, TOKENIZER, *manifest["files"]):
            path.unlink()
    for split, facts in manifest["splits"].items():
        writers[split].take_up(facts, manifest["files"])


def _no_continuation(folder: Path, change: str) -> DataError:
    return DataError(
        f"{folder} cannot be continued, what it was made from changed ({change}): restore it, or "
        f"begin again (rm -r {folder})"
    )


def _save(
    folder: Path,
    writers: dict[Split, "_SplitWriter"],
    facts: dict[str, Any],
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Writes the manifest of all that is stored, once it is on disk."""
    written = {split: writer for split, writer in writers.items() if writer.num_documents}
    splits = {split: writer.facts() for split, writer in written.items()}
    files = {name: x for writer in written.values() for name, x in writer.files().items()}
    manifest = sealed(facts | {"splits": splits, "files": files} | extra)
    write_json(folder / MANIFEST, manifest)
    return manifest


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
    split. Raises `DataError` if the others are not those that were stored."""
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


class _SplitWriter:
    """A writer of the shards and the starts of one split. `text`: the census of what is stored."""

    def __init__(self, folder: Path, split: Split, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._starts = folder / f"{split}.starts.bin"
        self._shards: list[Path] = []
        self._filled: dict[str, dict[str, Any]] = {}  # size and sha256
        self._room = self._num_tokens = self.num_documents = 0
        self.census, self._text = Census(), Census().summary()

    def take_up(self, facts: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
        """Goes back to the entries of the split and of its files in a manifest."""
        self._num_tokens, self.num_documents = facts["num_tokens"], facts["num_documents"]
        self._text = facts["text"]
        self._shards = [self._folder / name for name in facts["shards"]]
        self._filled = {name: files[name] for name in facts["shards"][:-1]}
        for path in (self._starts, *self._shards):
            num_bytes, digest = (files[path.name][x] for x in ("num_bytes", "sha256"))
            if path.exists():
                os.truncate(path, num_bytes)
            if problem := difference(path, num_bytes, digest):
                raise _no_continuation(self._folder, f"{path.name}: {problem}")
        sizes = [path.stat().st_size for path in self._shards]
        last_tokens = sizes[-1] * self._num_tokens // sum(sizes)
        self._room = max(0, self._shard_tokens - last_tokens)

    def check_text(self) -> None:
        """Raises `DataError` unless the text that was read is what is stored."""
        if self.census.summary() != self._text:
            change = f"the first {self.num_documents:,} documents of {self._split}"
            raise _no_continuation(self._folder, change)

    def append(self, records: TokenRecords, text: dict[str, Any]) -> bool:
        """Appends the documents; one that does not fit into the last shard begins a new one.
        Returns whether a shard was filled."""
        (ids,), starts = records.shards, records.starts
        new = starts[1:] if self.num_documents else starts  # the first is stored as the last end
        _append(self._starts, (self._num_tokens + new).astype("<u8"))
        begin, num_shards = 0, len(self._shards)
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
        self._text = text
        return len(self._shards) > num_shards > 0

    def facts(self) -> dict[str, Any]:
        """The entry of the split in the manifest."""
        return {
            "num_documents": self.num_documents,
            "num_tokens": self._num_tokens,
            "starts": self._starts.name,
            "shards": [shard.name for shard in self._shards],
            "text": self._text,
        }

    def files(self) -> dict[str, dict[str, Any]]:
        """Size and sha256 of each file; all are on disk when this returns."""
        facts = {}
        for path in (self._starts, *self._shards):
            facts[path.name] = self._filled.get(path.name) or _flushed(path)
            if path in self._shards[:-1]:
                self._filled[path.name] = facts[path.name]
        return facts


def _flushed(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"num_bytes": path.stat().st_size, "sha256": sha256(path)}


def _append(path: Path, values: np.ndarray) -> None:
    with path.open("ab") as file:
        file.write(np.ascontiguousarray(values).data)  # `tofile` hides why a disk refuses
