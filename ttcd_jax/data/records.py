"""Token records on disk: made of a corpus whose documents are streamed and tokenized by several
processes, and opened.

A folder of records holds

    manifest.json                  metadata, sizes and sha256 of all files, and its own sha256
    tokenizer.json                 the tokenizer that made them, unless it is the byte tokenizer
    <split>.00000.tokens.bin, ...  uint16 or uint32: documents as bos + tokens + eos, end to end
    <split>.starts.bin             uint64 [documents + 1]: the offset of each in the concatenated
                                   shards, and the end
    left_out.json                  why lines have no document, if some have none

All numbers are little-endian. No document is split between shards. While a folder is filled, its
manifest has the format `UNFINISHED` and lists what is on disk. A later call reads all text again,
but tokenizes only the other documents.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ttcd_jax import storage
from ttcd_jax.config import differences
from ttcd_jax.data.corpus import Census, CorpusConfig, EmptySplitError, Split, stream_documents
from ttcd_jax.data.documents import Document, LeftOut
from ttcd_jax.data.packing import AGAIN, TokenRecords, encode_documents, mapped, token_dtype
from ttcd_jax.data.pipeline import follow_parent
from ttcd_jax.data.tokenizer import TokenizerConfig, build_tokenizer
from ttcd_jax.errors import DataError, UserError, listed
from ttcd_jax.files import difference, is_file_name, read_json, sha256, write_json

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT = "ttcd_jax token records 1"
UNFINISHED = "ttcd_jax unfinished token records 2"
LEFT_OUT = "left_out.json"  # the first lines without a document
SHARD_TOKENS = 2**28

_SAVE_SECONDS = 60.0
_BATCH_BYTES = 2**20
_LONG_BYTES = 2**24  # a batch of more is not copied to another process and back
_BATCHES_AHEAD = 4  # for each process

Metadata = dict[str, Any]  # ready for JSON
type _Stream = Iterator[tuple[Split, Document]]
type _Batch = dict[Split, list[Document]]
type _Encoded = dict[Split, TokenRecords]


def read_manifest(folder: Path, *kinds: str) -> Metadata:
    """The manifest of a folder of records. Raises `DataError` unless it is intact and of a format
    in `kinds`, or of `FORMAT`."""
    path = storage.fetch(folder / MANIFEST)
    if not path.is_file():
        raise DataError(
            f"{folder} holds no token records (no {MANIFEST}); make them (ttcd "
            "prepare --input=TEXT --tokenizer=tokenizer.json --output=DIR; the "
            "paper's: --source=long_data_collections, as in configs/data/records.gin) and name "
            "them (RecordsConfig.paths; in a recipe --param=\"RECORDS='DIR'\")"
        )
    manifest = read_json(path)
    if manifest.get("format") not in (kinds or (FORMAT,)):
        raise DataError(f"{path} describes no {FORMAT!r}; {AGAIN}")
    if manifest != sealed({name: manifest[name] for name in manifest if name != "sha256"}):
        raise DataError(f"{path} was changed; {AGAIN}")
    if not _is_sound(manifest):
        raise DataError(f"{path} describes no files of its folder; {AGAIN}")
    return manifest


def _is_sound(manifest: Metadata) -> bool:
    """Whether the entries are there, counts are integers, and files are in the folder."""
    try:
        files, vocab_size = manifest["files"], manifest["vocab_size"]
        ids = [manifest["bos_id"], manifest["eos_id"], *manifest.get("stop_ids", [])]
        counts, dtype = [vocab_size, *ids], token_dtype(vocab_size)
        is_sound = "tokenizer" in manifest and manifest["dtype"] == dtype.name
        for entry in manifest["splits"].values():
            first, *sizes = [files[x]["num_bytes"] for x in (entry["starts"], *entry["shards"])]
            num_documents, num_tokens = entry["num_documents"], entry["num_tokens"]
            counts += [first, *sizes, num_documents, num_tokens, entry["text"]["num_bytes"]]
            is_sound &= num_documents > 0 and first == 8 * (num_documents + 1)
            is_sound &= sum(sizes) == dtype.itemsize * num_tokens
            is_sound &= all(size and size % dtype.itemsize == 0 for size in sizes)
        is_sound &= all(is_file_name(name) and "sha256" in x for name, x in files.items())
        is_sound &= all(0 <= x < vocab_size for x in ids)
    except (LookupError, TypeError, AttributeError):
        return False
    return is_sound and all(type(x) is int and x >= 0 for x in counts)


def sealed(manifest: Metadata) -> Metadata:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return manifest | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def open_records(folder: Path, split: Split, num_shards: int | None = None) -> TokenRecords:
    """The records of one split, or of its first shards, memory-mapped; those in a bucket are
    downloaded first. Raises `DataError` for an absent split or file, another size or digest (all
    files are read, by a thread per core), and starts that do not fit."""
    manifest = read_manifest(folder)
    if split not in manifest["splits"]:
        raise EmptySplitError(
            f"{folder} has no {split} split: prepare it with --validation_percent above 0, or from "
            "a folder with train/ and validation/"
        )
    entry, files = manifest["splits"][split], manifest["files"]
    names = *entry["shards"][:num_shards], entry["starts"]
    sizes = {folder / x: files[x]["num_bytes"] for x in names}
    storage.fetch(folder, lambda name: folder / name in sizes)
    digests = [files[path.name]["sha256"] for path in sizes]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_check, sizes, sizes.values(), digests))
    *paths, last = sizes
    dtype = token_dtype(manifest["vocab_size"])
    shards = [mapped(path, dtype) for path in paths]
    starts = np.fromfile(last, "<i8")  # no count of tokens reaches 2^63
    ends = np.cumsum([0, *(shard.size for shard in shards)])
    if num_shards is not None:
        starts = starts[starts <= ends[-1]]
    is_sound = (starts[0], starts[-1]) == (0, ends[-1]) and np.all(starts[:-1] < starts[1:])
    if not is_sound or not np.isin(ends, starts).all():
        raise DataError(f"{last} does not fit its shards; {AGAIN}")
    return TokenRecords(
        shards,
        starts,
        eos_id=manifest["eos_id"],
        where=f"{folder} ({split})",
        files=[(path, sizes[path]) for path in paths],
        samples_are_rows=manifest.get("samples_are_rows") is True,
    )


def records_tokenizer(folder: Path) -> TokenizerConfig:
    """The tokenizer that made the records. Raises `DataError` when its file has changed."""
    manifest = read_manifest(folder)
    if manifest["tokenizer"] == "byte":
        return TokenizerConfig(kind="byte")
    _check(storage.fetch(folder / TOKENIZER), digest=manifest["tokenizer"])
    ids = {name: manifest[name] for name in ("bos_id", "eos_id", "stop_ids") if name in manifest}
    return TokenizerConfig(kind="json", path=str(folder / TOKENIZER), **ids)


def verify_records(folder: Path) -> Metadata:
    """The manifest, after a check of every file."""
    manifest = read_manifest(folder)
    for split in manifest["splits"]:
        open_records(folder, split)
    records_tokenizer(folder)
    return manifest


def _check(path: Path, num_bytes: int | None = None, digest: str | None = None) -> None:
    if problem := difference(path, num_bytes, digest):
        raise DataError(f"{path}: {problem}; {AGAIN}")


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
        file = storage.copy_of(config.path)
        config = config.replace(path=str(shutil.copyfile(file, folder / TOKENIZER)))
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
    left_out, saved = LeftOut(), time.monotonic()
    documents = stream_documents(corpus, left_out=left_out)
    writer = _Writer(folder, shard_tokens)
    writer.take_up(arguments, documents, on_progress)
    encode = partial(_encode, config, samples_are_rows)
    for batch, encoded in _encoded(_batches(documents), encode, num_processes):
        for split, new in encoded.items():
            writer.append(split, batch[split], new)
            on_progress(int(new.starts[-1]))
        if time.monotonic() - saved > _SAVE_SECONDS:
            writer.save({"format": UNFINISHED} | metadata, arguments)
            saved = time.monotonic()
    if not writer.splits["train"]["num_documents"]:
        raise EmptySplitError.of(corpus, "train")
    extra: Metadata = {"samples_are_rows": True} if samples_are_rows else {}
    if left_out.num_lines:
        extra["lines_left_out"] = left_out.num_lines
        write_json(folder / LEFT_OUT, left_out.first)
    return writer.save({"format": FORMAT} | metadata, extra)


def stored_tokens(folder: Path) -> int:
    """Number of tokens that an unfinished folder keeps for the next call."""
    return sum(entry["num_tokens"] for entry in _stored(folder).get("splits", {}).values())


def _stored(folder: Path) -> Metadata:
    """The manifest of an unfinished folder, or of a complete one before it got its name."""
    with contextlib.suppress(DataError):
        return read_manifest(folder, UNFINISHED, FORMAT)
    return {}


def _batches(documents: _Stream) -> Iterator[tuple[_Batch, int]]:
    batch, num_bytes = collections.defaultdict(list), 0
    for split, document in documents:
        batch[split].append(document)
        num_bytes += len(document.content)
        if num_bytes >= _BATCH_BYTES:
            yield batch, num_bytes
            batch, num_bytes = collections.defaultdict(list), 0
    yield batch, num_bytes


def _encoded(
    batches: Iterator[tuple[_Batch, int]], encode: Callable[[_Batch], _Encoded], num_processes: int
) -> Iterator[tuple[_Batch, _Encoded]]:
    if num_processes == 1:
        yield from ((batch, encode(batch)) for batch, _ in batches)
        return
    spawn, pending = multiprocessing.get_context("spawn"), collections.deque()
    pool = concurrent.futures.ProcessPoolExecutor(num_processes, spawn, follow_parent, ("SIGINT",))
    try:
        for batch, num_bytes in batches:  # `pool.map` would read the whole corpus first
            is_long = num_bytes > _LONG_BYTES
            result = partial(encode, batch) if is_long else pool.submit(encode, batch).result
            pending.append((batch, result))
            while pending and (is_long or len(pending) > _BATCHES_AHEAD * num_processes):
                first, result = pending.popleft()
                yield first, result()
        yield from ((batch, result()) for batch, result in pending)
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {num_processes} tokenizing processes was killed, perhaps out of memory; run "
            "again with fewer --processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(config: TokenizerConfig, samples_are_rows: bool, batch: _Batch) -> _Encoded:
    tokenizer = _tokenizer(config)
    return {x: encode_documents(batch[x], tokenizer, samples_are_rows) for x in batch}


_tokenizer = cache(build_tokenizer)


class _Writer:
    """A writer of the shards and the starts in a folder. `splits`: their entries in the manifest,
    without the census of their text."""

    def __init__(self, folder: Path, shard_tokens: int) -> None:
        self._folder, self._shard_tokens = folder, shard_tokens
        self._census: dict[Split, Census] = {"train": Census(), "validation": Census()}
        self._files: dict[str, Metadata] = {}  # size and sha256 of those that are on disk
        self.splits: dict[Split, Metadata] = {}
        for split in self._census:
            files = {"starts": f"{split}.starts.bin", "shards": []}
            self.splits[split] = {"num_documents": 0, "num_tokens": 0} | files

    def take_up(
        self, arguments: Metadata, documents: _Stream, on_progress: Callable[[int], None]
    ) -> None:
        """Goes back to what the manifest lists, and passes over its documents. Raises `DataError`
        if they, the files or the arguments are others."""
        if not (manifest := _stored(self._folder)):
            return
        old = {name: manifest[name] for name in arguments if name in manifest}
        self._continue_if_no(differences(arguments | {"samples_are_rows": False} | old, arguments))
        self._files = manifest["files"]
        for path in self._folder.iterdir():
            if path.name not in (MANIFEST, TOKENIZER, *self._files):
                path.unlink()
        for name, entry in self._files.items():
            path, num_bytes = self._folder / name, entry["num_bytes"]
            if path.exists():
                os.truncate(path, num_bytes)
            problem = difference(path, num_bytes, entry["sha256"])
            self._continue_if_no([f"{name}: {problem}"] if problem else [])
        num_stored = sum(entry["num_documents"] for entry in manifest["splits"].values())
        for split, document in itertools.islice(documents, num_stored):
            self._census[split].add(document)
            on_progress(0)
        for split, self.splits[split] in manifest["splits"].items():
            is_same = self._census[split].summary() == self.splits[split].pop("text")
            self._continue_if_no([] if is_same else [f"the first {num_stored:,} documents"])

    def _continue_if_no(self, changes: list[str]) -> None:
        if changes:
            raise DataError(
                f"{self._folder} cannot be continued, what it was made from changed "
                f"({listed(changes)}): restore it, or begin again (rm -r {self._folder})"
            )

    def append(self, split: Split, documents: list[Document], new: TokenRecords) -> None:
        """Appends the documents; one that does not fit into the last shard begins a new one."""
        (ids,), starts, entry = new.shards, new.starts, self.splits[split]
        ends = starts[1:] if entry["num_documents"] else starts  # the first is stored as an end
        self._append(entry["starts"], (entry["num_tokens"] + ends).astype("<u8"))
        begin, shards, room = 0, entry["shards"], 0
        if shards:
            num_bytes = (self._folder / shards[-1]).stat().st_size
            room = self._shard_tokens - num_bytes // ids.itemsize
        while begin < len(new):
            end = int(np.searchsorted(starts, starts[begin] + room, side="right")) - 1
            if end > begin:
                self._append(shards[-1], ids[starts[begin] : starts[end]])
                begin, room = end, 0
            else:
                shards.append(f"{split}.{len(shards):05}.tokens.bin")
                room = max(self._shard_tokens, int(starts[begin + 1] - starts[begin]))
        entry["num_tokens"] += int(starts[-1])
        entry["num_documents"] += len(new)
        for document in documents:
            self._census[split].add(document)

    def _append(self, name: str, values: np.ndarray) -> None:
        self._files.pop(name, None)
        with (self._folder / name).open("ab") as file:
            file.write(np.ascontiguousarray(values).data)  # `tofile` hides why a disk refuses

    def save(self, metadata: Metadata, extra: Metadata) -> Metadata:
        """Writes the manifest of all that is stored, once it is on disk."""
        splits, before, self._files = {}, self._files, {}
        for split, its in self.splits.items():
            if not its["num_documents"]:
                continue
            splits[split] = its | {"text": self._census[split].summary()}
            for name in (its["starts"], *its["shards"]):
                path = self._folder / name
                if (found := before.get(name)) is None:
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                    found = {"num_bytes": path.stat().st_size, "sha256": sha256(path)}
                self._files[name] = found
        manifest = sealed(metadata | {"splits": splits, "files": self._files} | extra)
        write_json(self._folder / MANIFEST, manifest)
        return manifest
