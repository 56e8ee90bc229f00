"""Token records of a corpus, its documents streamed and tokenized by several processes.

While a folder is filled, its manifest has the format `UNFINISHED` and lists the files on disk. A
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

Metadata = dict[str, Any]  # ready for JSON
type _Writers = dict[Split, _SplitWriter]


class _Batch(NamedTuple):
    """Documents of one split, and the census of the split up to the last of them."""

    split: Split
    documents: list[Document]
    num_bytes: int
    text: Metadata


def prepare_records(
    corpus: CorpusConfig,
    config: TokenizerConfig,
    folder: Path,
    *,
    num_processes: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    samples_are_rows: bool = False,
    on_progress: Callable[[int], None] = lambda num_tokens: None,
) -> Metadata:
    """Fills `folder`, which is empty or unfinished, and returns its manifest; `on_progress` gets
    counts of new tokens, 0 while text is read again.

    The files depend on the number of neither processes nor calls. In memory: some megabytes of text
    per process, and the longest document with its tokens. A shard has at most `shard_tokens`
    tokens, or one document. `samples_are_rows`: samples of token ids get no bos and eos, and each
    is a row of the run. Raises `DataError` for documents that cannot be read or tokenized, an empty
    corpus, and an unfinished folder whose text or arguments were others.
    """
    if config.path is not None:
        build_tokenizer(config)  # an error names the user's file, not the copy
        config = config.replace(path=str(shutil.copyfile(config.path, folder / TOKENIZER)))
    tokenizer = build_tokenizer(config)
    metadata = {
        "tokenizer": "byte" if config.path is None else sha256(Path(config.path)),
        **{name: getattr(tokenizer, name) for name in ("vocab_size", "bos_id", "eos_id")},
        "stop_ids": [*tokenizer.stop_ids],
        "dtype": token_dtype(tokenizer.vocab_size).name,
    }
    arguments = {
        "tokenizer": metadata["tokenizer"],
        "samples_are_rows": samples_are_rows,
        "shard_tokens": shard_tokens,
        "corpus": corpus.to_dict() | {"path": None},  # its content is compared
    }
    writers: _Writers = {split: _SplitWriter(folder, split, shard_tokens) for split in SPLITS}
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
            _save(folder, writers, {"format": UNFINISHED} | metadata, arguments)
            saved = time.monotonic()
    if not writers["train"].num_documents:
        raise empty_split(corpus, "train")
    extra: Metadata = {"samples_are_rows": True} if samples_are_rows else {}
    if left_out.num_lines:
        extra["lines_left_out"] = left_out.num_lines
        write_json(folder / LEFT_OUT, left_out.first)
    return _save(folder, writers, {"format": FORMAT} | metadata, extra)


def stored_tokens(folder: Path) -> int:
    """Number of tokens that an unfinished folder keeps for the next call."""
    return sum(entry["num_tokens"] for entry in _stored(folder).get("splits", {}).values())


def _stored(folder: Path) -> Metadata:
    """The manifest of an unfinished folder, or of a complete one before it got its name."""
    with contextlib.suppress(DataError):
        return read_manifest(folder, UNFINISHED, FORMAT)
    return {}


def _take_up(folder: Path, arguments: Metadata, writers: _Writers) -> None:
    """Goes back to the files that the manifest lists."""
    if not (manifest := _stored(folder)):
        return
    old = {name: manifest[name] for name in arguments if name in manifest}
    if changed := differences(arguments | {"samples_are_rows": False} | old, arguments):
        raise _no_continuation(folder, listed(changed))
    for path in folder.iterdir():
        if path.name not in (MANIFEST, TOKENIZER, *manifest["files"]):
            path.unlink()
    for split, entry in manifest["splits"].items():
        writers[split].take_up(entry, manifest["files"])


def _no_continuation(folder: Path, change: str) -> DataError:
    return DataError(
        f"{folder} cannot be continued, what it was made from changed ({change}): restore it, or "
        f"begin again (rm -r {folder})"
    )


def _save(folder: Path, writers: _Writers, metadata: Metadata, extra: Metadata) -> Metadata:
    """Writes the manifest of all that is stored, once it is on disk."""
    written = {split: writer for split, writer in writers.items() if writer.num_documents}
    splits = {split: writer.entry for split, writer in written.items()}
    files = {name: x for writer in written.values() for name, x in writer.files().items()}
    manifest = sealed(metadata | {"splits": splits, "files": files} | extra)
    write_json(folder / MANIFEST, manifest)
    return manifest


def _batches(
    documents: Iterable[tuple[Split, Document]],
    writers: _Writers,
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
    encode = functools.partial(_encode, config)
    if num_processes == 1:
        yield from ((batch, encode(batch.documents)) for batch in batches)
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
                yield batch, encode(batch.documents)
            else:
                pending.append((batch, pool.submit(encode, batch.documents)))
        yield from ((batch, future.result()) for batch, future in pending)
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {num_processes} tokenizing processes was killed, perhaps out of memory; run "
            "again with fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_tokenizer = functools.cache(build_tokenizer)


def _encode(config: TokenizerConfig, documents: list[Document]) -> TokenRecords:
    return encode_documents(documents, _tokenizer(config))


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
    """A writer of the shards and the starts of one split. `entry`: the split's in the manifest,
    with the census of the text stored; `census`: that of the text read."""

    def __init__(self, folder: Path, split: Split, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens, self._room = folder, split, shard_tokens, 0
        self._filled: dict[str, Metadata] = {}  # size and sha256
        self.census = Census()
        self.entry: Metadata = {
            "num_documents": 0,
            "num_tokens": 0,
            "starts": f"{split}.starts.bin",
            "shards": [],
            "text": self.census.summary(),
        }

    @property
    def num_documents(self) -> int:
        return self.entry["num_documents"]

    def take_up(self, entry: Metadata, files: dict[str, Metadata]) -> None:
        """Goes back to the entries of the split and of its files in a manifest."""
        self.entry = entry
        for name in (entry["starts"], *entry["shards"]):
            path, num_bytes = self._folder / name, files[name]["num_bytes"]
            if path.exists():
                os.truncate(path, num_bytes)
            if problem := difference(path, num_bytes, files[name]["sha256"]):
                raise _no_continuation(self._folder, f"{name}: {problem}")
        self._filled = {name: files[name] for name in entry["shards"][:-1]}
        sizes = [files[name]["num_bytes"] for name in entry["shards"]]
        last_tokens = sizes[-1] * entry["num_tokens"] // sum(sizes)
        self._room = max(0, self._shard_tokens - last_tokens)

    def check_text(self) -> None:
        """Raises `DataError` unless the text read is the text stored."""
        if self.census.summary() != self.entry["text"]:
            change = f"the first {self.num_documents:,} documents of {self._split}"
            raise _no_continuation(self._folder, change)

    def append(self, records: TokenRecords, text: Metadata) -> bool:
        """Appends the documents; one that does not fit into the last shard begins a new one.
        Returns whether a shard was filled."""
        (ids,), starts, shards = records.shards, records.starts, self.entry["shards"]
        new = starts[1:] if self.num_documents else starts  # the first is stored as the last end
        _append(self._folder / self.entry["starts"], (self.entry["num_tokens"] + new).astype("<u8"))
        begin, num_shards = 0, len(shards)
        while begin < len(records):
            end = int(np.searchsorted(starts, starts[begin] + self._room, side="right")) - 1
            if end <= begin:
                self._room = max(self._shard_tokens, int(starts[begin + 1] - starts[begin]))
                shards.append(f"{self._split}.{len(shards):05}.tokens.bin")
                continue
            _append(self._folder / shards[-1], ids[starts[begin] : starts[end]])
            self._room -= int(starts[end] - starts[begin])
            begin = end
        self.entry["num_tokens"] += int(starts[-1])
        self.entry["num_documents"] += len(records)
        self.entry["text"] = text
        return len(shards) > num_shards > 0

    def files(self) -> dict[str, Metadata]:
        """Size and sha256 of each file; all are on disk when this returns."""
        shards = self.entry["shards"]
        files = {
            name: self._filled.get(name) or _flushed(self._folder / name)
            for name in (self.entry["starts"], *shards)
        }
        self._filled = {name: files[name] for name in shards[:-1]}
        return files


def _flushed(path: Path) -> Metadata:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"num_bytes": path.stat().st_size, "sha256": sha256(path)}


def _append(path: Path, values: np.ndarray) -> None:
    with path.open("ab") as file:
        file.write(np.ascontiguousarray(values).data)  # `tofile` hides why a disk refuses
