"""Values of one column in files of other libraries, in order.

Tables are Parquet and Arrow files. Arrow is memory-mapped, streams (the Hugging Face cache) and IPC
files alike. A folder as `datasets` saves it is its `state.json`, which lists the files of its rows.

An MDS folder (MosaicML Streaming) is its `index.json`, which lists shards in its folder:

    shard    u32 n | u32 offsets [n + 1] into the file | configuration as JSON | n samples
    sample   u32 size of each variable-size column | the columns, in the order of their names
    ndarray  u8 4 * axes + log2(bytes of a length) | length of each axis | values

Megatron-LM has token ids alone. A document is one sequence or several:

    NAME.idx   "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype | u64 sequences n | u64 documents + 1
               int32 sizes [n] | int64 offsets in bytes [n] | int64 first sequences [documents + 1]
    NAME.bin   the sequences, end to end

All numbers are little-endian. Nothing is unpickled.
"""

import itertools
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ttcd_jax.data.compressed import bytes_read, import_for, unpacked
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import is_file_name, read_json

STATE = "state.json"
INDEX = "index.json"

_PARQUET_ROWS = 256  # in memory at once
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_INDICES = "_indices_data_files"
_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
_MAX_SHARD = 2**30  # bytes in memory; the format's own default is 2^26
_ARRAY = re.compile(r"ndarray:(u?int(?:8|16|32|64))(?::(\d+))?")
_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def _refuse(path: Path | str, problem: str) -> NoReturn:
    raise DataError(f"{path} {problem}")


def read_table(path: Path, column: str) -> Iterator[Any]:
    """The values of `column`, row by row: lists of integers as arrays [T], texts as `str`, null as
    None. Raises `DataError` for a damaged file, and for a column that is absent."""
    if path.name == STATE:
        for file in _data_files(path):
            yield from read_table(file, column)
        return
    pyarrow, is_parquet = import_for(path, "pyarrow"), path.suffix == ".parquet"
    try:
        for values in (_parquet if is_parquet else _arrow)(path, column):
            values.validate(full=True)
            kind, types = values.type, pyarrow.types
            is_list = types.is_list(kind) or types.is_large_list(kind)
            if (is_list or types.is_fixed_size_list(kind)) and types.is_integer(kind.value_type):
                empty = pyarrow.array([], kind.value_type)
                yield from ((row.values if row.is_valid else empty).to_numpy() for row in values)
            else:
                yield from (value.as_py() for value in values)
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


def _position(path: Path, column: str, names: list[str]) -> int:
    if column not in names:
        _refuse(path, f"has no column {column!r}; pass --field (there: {', '.join(names)})")
    return names.index(column)


def _data_files(path: Path) -> list[Path]:
    state = read_json(path)
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
        if all(map(is_file_name, names)) and not state.get(_INDICES):
            return [path.parent / name for name in names]
        problem = "lists files elsewhere, or chosen rows of them"
    except (LookupError, TypeError) as error:
        problem = f"lists no files ({error!r})"
    _refuse(path, f"{problem}; save it again")


def check_one_split(folder: Path) -> None:
    """Raises `UserError` if `datasets` wrote several splits below `folder`, unless they are folders
    `train` and `validation`, or wrote intermediate results beside the rows."""
    for path in folder.rglob("dataset_dict.json"):
        splits = read_json(path).get("splits")
        if not isinstance(splits, list) or not {*map(str, splits)} <= {"train", "validation"}:
            raise UserError(f"{path} lists the splits {splits}: give the folder of one of them")
    for path in folder.rglob("dataset_info.json"):
        names = sorted({_NUMBER.sub("", file.stem) for file in path.parent.glob("*.arrow")})
        if len(names) > 1 and not path.with_name(STATE).exists():
            globs = ", ".join(f"**/{name}*.arrow" for name in names)
            raise UserError(f"{path.parent} holds several tables: choose one by --glob ({globs})")


def read_mds(index: Path, column: str) -> Iterator[bytes | np.ndarray]:
    """The values of `column`, sample by sample: bytes (encodings `str` and `bytes`), or integers
    [T] (`ndarray:uint32` and the like). One shard at a time is in memory. Raises `DataError` for a
    file that is damaged, outside the folder or pickled, and for a column that is absent or of
    another encoding."""
    try:
        shards = [_Shard(entry) for entry in read_json(index)["shards"]]
        formats = {shard.format for shard in shards}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{index} is no index of MDS shards ({error!r}); write it again") from error
    if formats - {("mds", 2)}:
        _refuse(index, f"lists shards of format {formats}; only MDS version 2 is read")
    for shard in shards:
        position = _checked_column(index, shard, column)
        path, data = _content(index.parent, shard)
        array = _ARRAY.fullmatch(shard.encodings[position])
        for number, sample in enumerate(_samples(path, data, shard.num_samples)):
            where = f"{path}, sample {number}"
            value = _value(where, sample, shard.sizes, position)
            yield value.tobytes() if array is None else _integers(where, value, array)


class _Shard:
    """An entry of an MDS index. `sizes`: bytes of each column, 0 if they vary by sample."""

    def __init__(self, entry: dict[str, Any]) -> None:
        raw, packed = entry["raw_data"], entry["zip_data"]
        self.format = entry["format"], entry["version"]
        self.name, self.num_bytes = str(raw["basename"]), int(raw["bytes"])
        self.packed_name = packed and str(packed["basename"])
        self.compression = str(entry["compression"]) if packed else ""
        self.num_samples = int(entry["samples"])
        self.columns = [str(name) for name in entry["column_names"]]
        self.encodings = [str(encoding) for encoding in entry["column_encodings"]]
        self.sizes = [int(size or 0) for size in entry["column_sizes"]]


def _checked_column(index: Path, shard: _Shard, column: str) -> int:
    """The position of `column`, after a check of all columns."""
    columns, encodings = shard.columns, shard.encodings
    if not len(columns) == len(encodings) == len(shard.sizes):
        _refuse(index, "has columns without a name, an encoding or a size: write it again")
    if any(encoding.split(":")[0] == "pkl" for encoding in encodings):
        _refuse(index, "has pickled columns, which can run code: write it again without 'pkl'")
    if column not in columns:
        there = ", ".join(columns)
        _refuse(index, f"has no column {column!r}, only {there}: name one by --field")
    encoding = encodings[columns.index(column)]
    if encoding not in ("str", "bytes") and not _ARRAY.fullmatch(encoding):
        raise DataError(
            f"column {column!r} of {index} has encoding {encoding!r}; read are str, bytes and "
            "one-dimensional ndarray:uint32 (or another integer): name another column by --field"
        )
    return columns.index(column)


def _content(folder: Path, shard: _Shard) -> tuple[Path, np.ndarray]:
    for name in filter(None, (shard.name, shard.packed_name)):
        if not is_file_name(name):
            _refuse(folder / INDEX, f"lists {name!r}, outside its folder: do not use it")
    path, limit = folder / shard.name, f"a shard may have {_MAX_SHARD}"
    if shard.packed_name and not path.is_file():
        path = folder / shard.packed_name
        if shard.compression.split(":")[0] != "zstd":
            kind = shard.compression
            _refuse(path, f"has compression {kind!r}; only zstd is read: decompress it")
    if not path.is_file():
        raise DataError(f"no shard at {path}: copy it again")
    if not 0 <= (size := shard.num_bytes) <= _MAX_SHARD:
        _refuse(path, f"holds {size} bytes, {limit}: write it again with a smaller size_limit")
    with unpacked(path) as file:
        data = np.frombuffer(file.read(size + 1), np.uint8)
    if data.size != size:
        _refuse(path, f"holds {data.size} bytes, its index says {size}: copy it again")
    return path, data


def _samples(path: Path, data: np.ndarray, num_samples: int) -> Iterator[np.ndarray]:
    size = num_samples + 2
    header = data[: data.size // 4 * 4].view("<u4")[:size].astype(np.int64)
    if size < 2 or header.size != size or header[0] != num_samples:
        _refuse(path, f"does not hold the {num_samples} samples of its index")
    offsets = header[1:]
    if offsets[0] < 4 * size or offsets[-1] != data.size or np.any(np.diff(offsets) < 0):
        _refuse(path, "is damaged, its samples do not follow each other: copy it again")
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


def read_megatron(index: Path) -> Iterator[np.ndarray]:
    """The ids [T] of each document, memory-mapped. Raises `DataError` unless the sizes, offsets and
    documents in the index fill both files exactly."""
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
