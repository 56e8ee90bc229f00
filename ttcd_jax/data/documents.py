"""Documents in files: one per text file; many per file of JSON lines, Parquet, Arrow or Megatron,
and per folder of MDS shards.

Arrow is memory-mapped, streams (the Hugging Face cache) and IPC files alike. An MDS folder
(MosaicML Streaming) is its `index.json`, which lists shards in its folder:

    shard    u32 n | u32 offsets [n + 1] into the file | configuration as JSON | n samples
    sample   u32 size of each variable-size column | the columns, in the order of their names
    ndarray  u8 4 * axes + log2(bytes of a length) | length of each axis | values

Megatron-LM has token ids alone. A document is one sequence or several:

    NAME.idx   "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype | u64 sequences n | u64 documents + 1
               int32 sizes [n] | int64 offsets in bytes [n] | int64 first sequences [documents + 1]
    NAME.bin   the sequences, end to end

All numbers are little-endian. Nothing is unpickled.
"""

import fnmatch
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ttcd_jax.data.compressed import MAX_BYTES, bytes_read, import_for, unpacked
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import decoded, is_file_name, read_json
from ttcd_jax.registry import Registry
from ttcd_jax.units import printable

_LEAST_LINES = 10_000  # until they are read, as many lines are left out as of this number
_OBJECTS = "write an object on each line (jq -c '.[]' of a list)"
_PACKED = re.compile(rb"\x1f\x8b|\(\xb5/\xfd|BZh\d1AY|\xfd7zXZ|7z\xbc\xaf|PK\x03\x04|PAR1")
_PARQUET_ROWS = 256  # in memory at once
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_INDEX, _IDX = "index.json", "*.idx"
_MAX_SHARD = 2**30  # bytes in memory; the format's own default is 2^26
_ARRAY = re.compile(r"ndarray:(u?int(?:8|16|32|64))(?::(\d+))?")
_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


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
    kind = _kind(path)
    try:
        if kind is None or (read := _READERS[kind]) is None:
            yield Document(name, _plain(path))
            return
        for number, value in enumerate(read(path, field)):
            left_out.add(value)
            if isinstance(value, bytes):
                yield Document(f"{name}:{number}", value)
            elif isinstance(value, np.ndarray):
                yield Document(f"{name}:{number}", b"", _checked_size(f"{path}:{number}", value))
            elif not isinstance(value, DataError):
                given = type(value).__name__
                raise UserError(f"the reader of {kind} yields {given}: yield text.encode()")
    except OSError as error:
        where = error.filename or path
        raise DataError(f"{where} cannot be read: {error.strerror or error}") from error


def holds_many(path: Path) -> bool:
    """Whether a file of this name holds many documents, one per line, row or sample. Raises
    `DataError` for an unknown kind of file."""
    if (kind := _kind(path)) is None:
        raise DataError(
            f"{path} is of an unknown kind (known: {', '.join(_READERS)}): convert it; name plain "
            f"text {path.name}.txt"
        )
    return _READERS[kind] is not None


def lists_files(path: PurePath) -> bool:
    """Whether a file of this name, or pattern, stands for others in its folder."""
    return _kind(path) in (_INDEX, _IDX)


def with_companions(file: Path) -> set[Path]:
    beside = file.parent.iterdir() if lists_files(file) else ()
    return {file, *(x for x in beside if file.name == _INDEX or x == file.with_suffix(".bin"))}


def glob_of(folder: Path | str, names: Iterable[PurePath]) -> str:
    """The pattern that matches the files of documents below `folder`, all of one kind, among files
    of these names. Raises `UserError` for none, several kinds, and what `datasets` wrote."""
    names = list(names)
    found = set(map(_kind, names))
    globs = [f"**/{kind}" for kind in _READERS if kind in found]
    if not globs:
        raise UserError(f"no file below {folder} matches {', '.join(_READERS)}; pass --glob")
    if len(globs) > 1:
        raise UserError(
            f"{folder} holds documents of several kinds: choose one by --glob ({', '.join(globs)})"
        )
    if globs == ["**/*.arrow"] and any(name.name == "dataset_info.json" for name in names):
        raise UserError(f"{folder} was written by `datasets`: choose tables by --glob (**/*.arrow)")
    return globs[0]


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


def _refuse(path: Path | str, problem: str) -> NoReturn:
    raise DataError(f"{path} {problem}")


def _position(path: Path, column: str, names: list[str]) -> int:
    if column not in names:
        _refuse(path, f"has no column {column!r}; pass --field (there: {', '.join(names)})")
    return names.index(column)


def _table(path: Path, column: str) -> Iterator[bytes | np.ndarray]:
    """The values of a column: lists of integers as arrays [T], texts as bytes."""
    pyarrow, is_parquet = import_for(path, "pyarrow"), path.suffix == ".parquet"
    rows = itertools.count()
    try:
        for values in (_parquet if is_parquet else _arrow)(path, column):
            values.validate(full=True)
            kind, types = values.type, pyarrow.types
            is_list = types.is_list(kind) or types.is_large_list(kind)
            if (is_list or types.is_fixed_size_list(kind)) and types.is_integer(kind.value_type):
                if values.flatten().null_count:
                    _refuse(path, f"has null among the ids of {column!r}: drop such rows")
                empty = pyarrow.array([], kind.value_type)
                yield from ((row.values if row.is_valid else empty).to_numpy() for row in values)
            else:
                for value, row in zip(values, rows, strict=False):
                    yield _text(f"{path}, row {row}", column, value.as_py())
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        kind = "Parquet" if is_parquet else "Arrow"
        raise DataError(f"{path} is no intact {kind} file ({error}); copy it again") from error


def _parquet(path: Path, column: str) -> Iterator[Any]:
    parquet = import_for(path, "pyarrow.parquet")
    with unpacked(path) as content, parquet.ParquetFile(content) as file:
        _position(path, column, file.schema_arrow.names)
        for batch in file.iter_batches(_PARQUET_ROWS, columns=[column]):
            yield batch.column(0)


def _arrow(path: Path, column: str) -> Iterator[Any]:
    pyarrow = import_for(path, "pyarrow")
    with pyarrow.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            file.seek(max(0, file.size() - len(_END_OF_STREAM)))
            if file.read() != _END_OF_STREAM:
                _refuse(path, "is no intact Arrow file (it has no end); copy it again")
            file.seek(0)
            batches = reader = pyarrow.ipc.open_stream(file)
        position = _position(path, column, reader.schema.names)
        for batch in batches:
            bytes_read(batch.nbytes)
            yield batch.column(position)


def _mds(index: Path, column: str) -> Iterator[bytes | np.ndarray]:
    """The values of `column`, sample by sample: bytes (encodings `str` and `bytes`), or integers
    [T] (`ndarray:uint32` and the like). One shard at a time is in memory."""
    try:
        shards = [_Shard(index, entry, column) for entry in read_json(index)["shards"]]
    except DataError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{index} is no index of MDS shards ({error!r}); write it again") from error
    for shard in shards:
        with unpacked(shard.path) as file:
            data = np.frombuffer(file.read(shard.num_bytes + 1), np.uint8)
        for number, sample in enumerate(shard.samples(data)):
            where = f"{shard.path}, sample {number}"
            value = _value(where, sample, shard.sizes, shard.position)
            yield value.tobytes() if shard.array is None else _integers(where, value, shard.array)


class _Shard:
    """An entry of an MDS index. `sizes`: bytes of each column, 0 if they vary by sample; `array`:
    the type of arrays in the column at `position`."""

    def __init__(self, index: Path, entry: dict[str, Any], column: str) -> None:
        kind, raw = (entry["format"], entry["version"]), entry["raw_data"]
        packed = entry["zip_data"]
        self.num_bytes, self.num_samples = int(raw["bytes"]), int(entry["samples"])
        names, encodings = ([*map(str, entry[f"column_{x}"])] for x in ("names", "encodings"))
        self.sizes = [int(size or 0) for size in entry["column_sizes"]]
        if kind != ("mds", 2):
            _refuse(index, f"lists a shard of format {kind}; only MDS version 2 is read")
        if not len(names) == len(encodings) == len(self.sizes):
            _refuse(index, "has columns without a name, an encoding or a size: write it again")
        if any(encoding.split(":")[0] == "pkl" for encoding in encodings):
            _refuse(index, "has pickled columns, which can run code: write it again without 'pkl'")
        self.position = _position(index, column, names)
        encoding = encodings[self.position]
        self.array = _ARRAY.fullmatch(encoding)
        if self.array is None and encoding not in ("str", "bytes"):
            raise DataError(
                f"column {column!r} of {index} has encoding {encoding!r}; read are str, bytes and "
                "one-dimensional ndarray:uint32 (or another integer): name another column by "
                "--field"
            )
        files = [part["basename"] for part in (raw, packed) if part]
        for name in files:
            if not is_file_name(name):
                beside = "choose the index beside the shards (--glob='*/index.json')"
                _refuse(index, f"lists {name!r}, outside its folder: {beside}")
        self.path = index.with_name(files[0])
        if packed and not self.path.is_file():
            self.path = index.with_name(files[1])
            if (compression := str(entry["compression"])).split(":")[0] != "zstd":
                problem = f"has compression {compression!r}; only zstd is read: decompress it"
                _refuse(self.path, problem)
        if not self.path.is_file():
            raise DataError(f"no shard at {self.path}: copy it again")
        if not 0 <= (size := self.num_bytes) <= _MAX_SHARD:
            problem = f"holds {size} bytes, a shard may have {_MAX_SHARD}"
            _refuse(self.path, f"{problem}: write it again with a smaller size_limit")

    def samples(self, data: np.ndarray) -> Iterator[np.ndarray]:
        if data.size != self.num_bytes:
            problem = f"holds {data.size} bytes, its index says {self.num_bytes}: copy it again"
            _refuse(self.path, problem)
        size = self.num_samples + 2
        header = data[: data.size // 4 * 4].view("<u4")[:size].astype(np.int64)
        if size < 2 or header.size != size or header[0] != self.num_samples:
            _refuse(self.path, f"does not hold the {self.num_samples} samples of its index")
        offsets = header[1:]
        if offsets[0] < 4 * size or offsets[-1] != data.size or np.any(np.diff(offsets) < 0):
            _refuse(self.path, "is damaged, its samples do not follow each other: copy it again")
        yield from (data[start:stop] for start, stop in itertools.pairwise(offsets))


def _value(where: str, sample: np.ndarray, sizes: list[int], position: int) -> np.ndarray:
    head = sample[: 4 * sizes.count(0)]
    if head.size == 4 * sizes.count(0):
        variable = iter(head.view("<u4").tolist())
        sizes = [size or next(variable) for size in sizes]
        start = head.size + sum(sizes[:position])
        if head.size + sum(sizes) == sample.size:
            return sample[start : start + sizes[position]]
    _refuse(where, "is damaged, its columns do not fill it: copy the shard again")


def _integers(where: str, value: np.ndarray, array: re.Match[str]) -> np.ndarray:
    dtype = np.dtype(array[1]).newbyteorder("<")
    if array[2] is not None:
        lengths, values = [int(array[2])], value
    else:
        num_axes, width = divmod(int(value[0]) if value.size else 0, 4)
        head = value[1 : 1 + (num_axes << width)]
        lengths = head.view(f"<u{1 << width}").tolist() if head.size == num_axes << width else []
        values = value[1 + head.size :]
    if len(lengths) != 1 or math.prod(lengths) * dtype.itemsize != values.size:
        _refuse(where, f"holds no one-dimensional array of {array[1]}: write it as one")
    return values.view(dtype)


def _megatron(index: Path, _: str) -> Iterator[np.ndarray]:
    """The ids [T] of each document, memory-mapped."""
    again = "copy both files again"
    with index.open("rb") as file:
        header = file.read(_HEADER.size).ljust(_HEADER.size, b"\0")
    magic, version, code, n, num_starts = _HEADER.unpack(header)
    if (magic, version) != (_MAGIC, 1) or code not in _DTYPES:
        known = f"{_MAGIC}, 1, {[*_DTYPES]}"
        _refuse(index, f"begins {magic}, {version}, {code}; read are {known}; {again}")
    size, path, dtype = index.stat().st_size, index.with_suffix(".bin"), np.dtype(_DTYPES[code])
    if size != (needed := _HEADER.size + 12 * n + 8 * num_starts) or 0 in (n, num_starts):
        counts = f"{n} sequences and {num_starts} documents take {needed}"
        _refuse(index, f"has {size} bytes; {counts}; {again}")
    if not (num_bytes := path.stat().st_size) or num_bytes % dtype.itemsize:
        _refuse(path, f"has {num_bytes} bytes, no whole number of {dtype.name} ids; {again}")
    sizes = np.memmap(index, "<i4", "r", _HEADER.size, n)
    offsets = np.memmap(index, "<i8", "r", _HEADER.size + 4 * n, n)
    starts = np.memmap(index, "<i8", "r", _HEADER.size + 12 * n, num_starts)
    ids, end = np.asarray(np.memmap(path, dtype, "r")), 0
    for number, (first, stop) in enumerate(itertools.pairwise(starts)):
        lengths, begin = sizes[first:stop], end
        end += int(lengths.sum(dtype=np.int64))
        is_sound = 0 <= first <= stop <= n and lengths.min(initial=0) >= 0 and end <= ids.size
        if not is_sound or (first < stop and offsets[first] != begin * dtype.itemsize):
            _refuse(index, f"does not fit {path} at document {number}; {again}")
        bytes_read((end - begin) * dtype.itemsize)
        yield ids[begin:end]
    if (starts[-1], end) != (n, ids.size):
        its = f"its documents {end} in {starts[-1]}"
        _refuse(path, f"has {ids.size} ids in {n} sequences, {its}; {again}")


Reader = Callable[[Path, str], Iterator[bytes | np.ndarray | DataError]]
# None: one document of plain text. Kinds are offered to the user in this order.
_READERS = Registry[Reader | None]("reader")
register = _READERS.add  # (reader, pattern of the names of files)
_READERS |= {
    **dict.fromkeys(("*.txt", "*.txt.gz", "*.txt.zst")),
    **dict.fromkeys(("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.json.gz"), _json_lines),
    **dict.fromkeys(("*.parquet", "*.arrow"), _table),
    _INDEX: _mds,
    _IDX: _megatron,
}


def _kind(path: PurePath) -> str | None:
    return next((kind for kind in _READERS if fnmatch.fnmatchcase(path.name, kind)), None)
