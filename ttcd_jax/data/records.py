"""Token records: documents as token ids, in memory or memory-mapped, read at any position.

A folder of records holds

    manifest.json                  metadata, sizes and sha256 of all files, and its own sha256
    tokenizer.json                 the tokenizer that made them, unless it is the byte tokenizer
    <split>.00000.tokens.bin, ...  uint16 or uint32: documents as bos + tokens + eos, end to end
    <split>.starts.bin             uint64 [documents + 1]: the offset of each in the concatenated
                                   shards, and the end
    left_out.json                  why lines have no document, if some have none

All numbers are little-endian. No document is split between shards.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ttcd_jax.data.corpus import EmptySplitError, Split
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import DataError
from ttcd_jax.files import difference, is_file_name, read_json

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
FORMAT = "ttcd_jax token records 1"

_AGAIN = "copy it again, or prepare it anew (experiments.prepare_data)"


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 if it holds every id, else uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenRecords:
    """Tokenized documents: `shards` of ids [tokens], and int64 `starts` [documents + 1], the offset
    of each document in the concatenated shards, and the end. `where` names them in errors, `files`
    are those of memory-mapped shards, with their sizes. `samples_are_rows`: every document is one
    whole row. `num_files`: of the text, if it was read from files just now."""

    shards: Sequence[np.ndarray]
    starts: np.ndarray
    _: dataclasses.KW_ONLY
    vocab_size: int
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

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Ids [stop - start] of the tokens `start` to `stop` of a document. Raises `DataError` for
        an id outside the vocabulary, and for a mapped file that was cut: reading it would kill the
        process."""
        first = self.starts[document]
        shard = np.searchsorted(self._ends, first, side="right")
        if self.files:
            path, num_bytes = self.files[shard]
            with contextlib.suppress(FileNotFoundError):  # unlinked: the mapping has its content
                if (size := path.stat().st_size) < num_bytes:
                    raise DataError(f"{path} was cut to {size} of {num_bytes} bytes; {_AGAIN}")
        offset = first - self._ends[shard] + self.shards[shard].size
        ids = self.shards[shard][offset + start : offset + stop]
        if ids.max(initial=0) >= self.vocab_size:
            raise DataError(
                f"{self.where}, document {document}: token {ids.max()} is outside the vocabulary "
                f"of {self.vocab_size} tokens; {_AGAIN}"
            )
        return ids


def read_manifest(folder: Path, *kinds: str) -> dict[str, Any]:
    """The manifest of a folder of records. Raises `DataError` unless it is intact and of a format
    in `kinds`, or of `FORMAT`."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{folder} holds no token records (no {MANIFEST}); make them (python -m "
            "experiments.prepare_data --input=TEXT --tokenizer=tokenizer.json --output=DIR; the "
            "paper's: --source=long_data_collections, as in configs/data/records.gin) and name "
            "them (RecordsConfig.paths; in a recipe --param=\"RECORDS='DIR'\")"
        )
    manifest = read_json(path)
    if manifest.get("format") not in (kinds or (FORMAT,)):
        raise DataError(f"{path} describes no {FORMAT!r}; {_AGAIN}")
    if manifest != sealed({name: manifest[name] for name in manifest if name != "sha256"}):
        raise DataError(f"{path} was changed; {_AGAIN}")
    if not _is_sound(manifest):
        raise DataError(f"{path} describes no files of its folder; {_AGAIN}")
    return manifest


def _is_sound(manifest: dict[str, Any]) -> bool:
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


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """`manifest` with its own sha256 added."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return manifest | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def open_records(folder: Path, split: Split) -> TokenRecords:
    """The records of one split, memory-mapped. Raises `DataError` for an absent split or file, for
    a file of another size or digest (all are read for it, by as many threads as there are cores),
    and for starts that do not fit."""
    manifest = read_manifest(folder)
    if split not in manifest["splits"]:
        raise EmptySplitError(
            f"{folder} has no {split} split: prepare it with --validation_percent above 0, or from "
            "a folder with train/ and validation/"
        )
    entry, files = manifest["splits"][split], manifest["files"]
    sizes = {folder / x: files[x]["num_bytes"] for x in (*entry["shards"], entry["starts"])}
    digests = [files[path.name]["sha256"] for path in sizes]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_check, sizes, sizes.values(), digests))
    *paths, last = sizes
    dtype = token_dtype(manifest["vocab_size"])
    # Plain arrays: slices of a memmap cost numpy more.
    shards = [np.asarray(np.memmap(path, dtype, "r")) for path in paths]
    starts = np.fromfile(last, "<i8")  # no count of tokens reaches 2^63
    ends = np.cumsum([0, *(shard.size for shard in shards)])
    is_sound = (starts[0], starts[-1]) == (0, ends[-1]) and np.all(starts[:-1] < starts[1:])
    if not is_sound or not np.isin(ends, starts).all():
        raise DataError(f"{last} does not fit its shards; {_AGAIN}")
    options = {name: manifest[name] for name in ("vocab_size", "eos_id")}
    options["samples_are_rows"] = manifest.get("samples_are_rows") is True
    mapped = [(path, sizes[path]) for path in paths]
    return TokenRecords(shards, starts, where=f"{folder} ({split})", files=mapped, **options)


def records_tokenizer(folder: Path) -> TokenizerConfig:
    """The tokenizer that made the records. Raises `DataError` when its file has changed."""
    manifest = read_manifest(folder)
    if manifest["tokenizer"] == "byte":
        return TokenizerConfig(kind="byte")
    _check(folder / TOKENIZER, digest=manifest["tokenizer"])
    ids = {name: manifest[name] for name in ("bos_id", "eos_id", "stop_ids") if name in manifest}
    return TokenizerConfig(kind="json", path=str(folder / TOKENIZER), **ids)


def verify_records(folder: Path) -> dict[str, Any]:
    """The manifest, after a check of every file. Raises `DataError` naming the first that differs
    from the one written."""
    manifest = read_manifest(folder)
    for split in manifest["splits"]:
        open_records(folder, split)
    records_tokenizer(folder)
    return manifest


def _check(path: Path, num_bytes: int | None = None, digest: str | None = None) -> None:
    if problem := difference(path, num_bytes, digest):
        raise DataError(f"{path}: {problem}; {_AGAIN}")
