"""Documents in files: one per text file; many per file of JSON lines, Parquet, Arrow or Megatron,
and per folder of MDS shards or of `datasets`."""

import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from ttcd_jax.data.compressed import MAX_BYTES, unpacked
from ttcd_jax.data.formats import INDEX, STATE, check_one_split, read_mds, read_megatron, read_table
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import decoded
from ttcd_jax.registry import Registry
from ttcd_jax.units import printable

_LEAST_LINES = 10_000  # until they are read, as many lines are left out as of this number
_OBJECTS = "write an object on each line (jq -c '.[]' of a list)"
_PACKED = re.compile(rb"\x1f\x8b|\(\xb5/\xfd|BZh\d1AY|\xfd7zXZ|7z\xbc\xaf|PK\x03\x04|PAR1")


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


class LeftOut:
    """Number of lines without a document, at most one or the fraction `SHARE`, never all, and why
    the first have none."""

    SHARE, MOST = 0.001, 100

    def __init__(self) -> None:
        self.num_lines = self._num_read = 0
        self.first: list[str] = []

    def add(self, value: bytes | np.ndarray | DataError) -> None:
        """Counts a document, or its error."""
        self._num_read += 1
        if isinstance(value, DataError):
            self.num_lines += 1
            self.first = [*self.first, str(value)][: self.MOST]
            self.check(_LEAST_LINES)

    def check(self, least_lines: int = 0) -> None:
        """Raises `DataError` for too many of the lines, or of `least_lines` if that is more."""
        most = max(self.SHARE * max(self._num_read, least_lines), 1)
        if self.num_lines > most or self.num_lines == self._num_read > least_lines:
            raise DataError(f"{self} (at most one, or {self.SHARE:.1%}, are left out)")

    def __str__(self) -> str:
        first = printable(self.first[0])
        return f"{self.num_lines:,} of {self._num_read:,} lines hold no document: {first}"


def read_documents(path: Path, name: str, field: str, left_out: LeftOut) -> Iterator[Document]:
    """The documents of one file, in order, one in memory at a time (of an MDS folder, one shard).

    `field` is the key or column of the text in a file of many; null is read as an empty text. Lines
    without a document are counted in `left_out`. Raises `DataError` naming the file, and the line,
    row or sample, that cannot be read, or has more than `MAX_BYTES`.
    """
    try:
        if (read := _READERS.get(_kind(path) or "")) is None:
            yield Document(name, _plain(path))
            return
        for number, value in enumerate(read(path, field)):
            left_out.add(value)
            if isinstance(value, bytes):
                yield Document(f"{name}:{number}", value)
            elif isinstance(value, np.ndarray):
                yield Document(f"{name}:{number}", b"", _checked_size(f"{path}:{number}", value))
            elif not isinstance(value, DataError):
                kind = type(value).__name__
                raise UserError(f"the reader of {_kind(path)} yields {kind}: yield text.encode()")
    except OSError as error:
        where = error.filename or path
        raise DataError(f"{where} cannot be read: {error.strerror or error}") from error


def holds_many(path: Path) -> bool:
    """Whether a file of this name holds many documents, one per line, row or sample. Raises
    `DataError` for an unknown kind of file."""
    kind = _kind(path)
    if kind is None:
        raise DataError(
            f"{path} is of an unknown kind (known: {', '.join(_READERS)}): convert it; name plain "
            f"text {path.name}.txt"
        )
    return _READERS[kind] is not None


def readable_glob(folder: Path) -> str:
    """The pattern that matches the files of documents below `folder`, all of one kind. Raises
    `UserError` for none, several kinds, and several splits in one folder of `datasets`."""
    check_one_split(folder)
    files = (path for path in folder.rglob("*") if path.is_file())
    return glob_of(folder, (path.relative_to(folder) for path in files))


def glob_of(folder: Path | str, names: Iterable[PurePath]) -> str:
    """`readable_glob` of a folder with files of these names."""
    names = list(names)
    saved = {name.parent for name in names if name.name == STATE}
    found = {_kind(name) for name in names if name.suffix != ".arrow" or name.parent not in saved}
    globs = [f"**/{kind}" for kind in _READERS if kind in found]
    if not globs:
        raise UserError(f"no file below {folder} matches {', '.join(_READERS)}; pass --glob")
    if len(globs) > 1:
        raise UserError(
            f"{folder} holds documents of several kinds: choose one by --glob ({', '.join(globs)})"
        )
    return globs[0]


def lists_files(glob: str) -> bool:
    """Whether a file of this name stands for others in its folder."""
    return _kind(PurePath(glob)) in (INDEX, STATE, "*.idx")


def _plain(path: Path) -> bytes:
    with unpacked(path) as file:
        text = file.read(MAX_BYTES + 1)
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16 text: make it UTF-8 (iconv -f UTF-16 -t UTF-8)")
    if _PACKED.match(text):
        raise DataError(f"{path} is packed, not text: unpack it, or name it by its kind (.txt.gz)")
    return _checked_size(str(path), text)


def _checked_size[T: (bytes, np.ndarray)](where: str, content: T) -> T:
    if len(content) * getattr(content, "itemsize", 1) > MAX_BYTES:
        raise DataError(f"{where} has more than {MAX_BYTES} bytes, the largest document: divide it")
    return content


def _json_lines(path: Path, field: str) -> Iterator[bytes | DataError]:
    with unpacked(path) as file:
        lines = iter(lambda: file.readline(MAX_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if not _checked_size(f"{path}, line {number}", line).isspace():
                try:
                    yield _json_text(f"{path}, line {number}", field, line)
                except DataError as error:
                    yield error


def _json_text(where: str, field: str, line: bytes) -> bytes:
    try:
        record = json.loads(decoded(line))
    except (ValueError, RecursionError) as error:
        remedy = _OBJECTS if line.strip() in (b"[", b"{") else "repair or remove it"
        raise DataError(f"{where} is not JSON ({error}); {remedy}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is no object but {type(record).__name__}; {_OBJECTS}")
    if field not in record:
        there = ", ".join(record)
        raise DataError(f"{where} has no field {field!r}; pass --field (there: {there})")
    return _text(where, field, record[field])


def _rows(path: Path, field: str) -> Iterator[bytes | np.ndarray]:
    for row, value in enumerate(read_table(path, field)):
        is_array = isinstance(value, np.ndarray)
        yield value if is_array else _text(f"{path}, row {row}", field, value)


def _text(where: str, field: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return _checked_size(where, value)
    if value is not None and not isinstance(value, str):
        problem = f"{where}: {field!r} is no text but {type(value).__name__}"
        more = ", or make one of its values a field" if isinstance(value, dict) else ""
        raise DataError(f"{problem}; pass another --field{more}")
    try:
        return _checked_size(where, (value or "").encode())
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {field!r} is no Unicode text ({error}); repair it") from error


Reader = Callable[[Path, str], Iterator[bytes | np.ndarray | DataError]]
# None: one document of plain text. Kinds are offered to the user in this order.
_READERS = Registry[Reader | None]("reader")
register = _READERS.add  # (reader, pattern of the names of files)
_READERS |= {
    **dict.fromkeys(("*.txt", "*.txt.gz", "*.txt.zst")),
    **dict.fromkeys(("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.json.gz"), _json_lines),
    **dict.fromkeys(("*.parquet", STATE, "*.arrow"), _rows),
    INDEX: read_mds,
    "*.idx": lambda path, field: read_megatron(path),
}


def _kind(path: PurePath) -> str | None:
    return next((kind for kind in _READERS if fnmatch.fnmatchcase(path.name, kind)), None)
