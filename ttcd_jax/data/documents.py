"""Documents in files: one per text file, many per JSON lines or Parquet file or MDS folder."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ttcd_jax.data.compressed import decompressed, import_for
from ttcd_jax.data.mds import INDEX, read_column
from ttcd_jax.errors import DataError, UserError

_PARQUET_ROWS = 256  # rows in memory at once


class Document(NamedTuple):
    """One text and its name: the file's path relative to the corpus, with `:number` in a file of
    many documents. A tokenized document has `tokens` [T] and no text."""

    name: str
    text: bytes
    tokens: np.ndarray | None = None

    @property
    def content(self) -> bytes:
        """The bytes that distinguish the document from others of the same name."""
        return self.text if self.tokens is None else self.tokens.tobytes()


def read_documents(path: Path, name: str, field: str) -> Iterator[Document]:
    """The documents of one file, in order, one in memory at a time (of an MDS folder, one shard).

    `field` is the key or column of the text in a file of many; null is read as an empty text.
    Raises `DataError` naming the file, and the line, row or sample, that cannot be read.
    """
    try:
        read = _reader(path)
        if read is None:
            yield Document(name, path.read_bytes())
            return
        for number, value in enumerate(read(path, field)):
            is_text = isinstance(value, bytes)
            yield Document(f"{name}:{number}", *((value, None) if is_text else (b"", value)))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def holds_many(path: Path) -> bool:
    """Whether a file of this name holds many documents, one per line, row or sample."""
    return _reader(path) is not None


def readable_glob(folder: Path) -> str:
    """The pattern that matches the files of documents below `folder`, all of one kind.

    Raises `UserError` when there is no such file, or there are several kinds.
    """
    kinds = ("*.txt", *_READERS)
    globs = [f"**/{kind}" for kind in kinds if any(map(Path.is_file, folder.rglob(kind)))]
    if not globs:
        raise UserError(f"no file below {folder} matches {', '.join(kinds)}; pass --glob")
    if len(globs) > 1:
        raise UserError(
            f"{folder} holds documents of several kinds: choose one by --glob ({', '.join(globs)})"
        )
    return globs[0]


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix != ".zst":
        with path.open("rb") as file:
            yield from file
        return
    rest = b""
    for piece in decompressed(path):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    yield rest


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON ({error}); repair or remove it") from error
        if not isinstance(record, dict) or field not in record:
            keys = ", ".join(record) if isinstance(record, dict) else "none"
            raise DataError(f"{where} has no field {field!r}; pass --field (there: {keys})")
        yield _text(where, field, record[field])


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    pyarrow, parquet = import_for(path, "pyarrow"), import_for(path, "pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise DataError(
                    f"{path} has no column {field!r}; pass --field (there: {', '.join(names)})"
                )
            row = 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield _text(f"{path}, row {row}", field, value)
                    row += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is no intact Parquet file ({error}); copy it again") from error


def _text(where: str, field: str, value: Any) -> bytes:
    if value is not None and not isinstance(value, str):
        kind = type(value).__name__
        raise DataError(f"{where}: {field!r} is no text but {kind}; pass another --field")
    try:
        return (value or "").encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {field!r} is no Unicode text ({error}); repair it") from error


Reader = Callable[[Path, str], Iterator[bytes | np.ndarray]]
_READERS: dict[str, Reader] = {
    "*.jsonl": _json_lines,
    "*.jsonl.zst": _json_lines,
    "*.parquet": _parquet,
    INDEX: read_column,
}


def _reader(path: Path) -> Reader | None:
    return next((read for kind, read in _READERS.items() if path.match(kind)), None)
