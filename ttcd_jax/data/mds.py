"""One column of an MDS folder (MosaicML Streaming): `index.json` and the shards it lists.

    shard    u32 n | u32 offsets [n + 1] into the file | configuration as JSON | n samples
    sample   u32 size of each variable-size column | the columns, in the order of their names
    ndarray  u8 4 * axes + log2(bytes of a length) | length of each axis | values

All numbers are little-endian. Nothing is unpickled; shards must be in the folder of their index.
"""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ttcd_jax.data.compressed import unpacked
from ttcd_jax.errors import DataError
from ttcd_jax.files import is_file_name, read_json

INDEX = "index.json"

_MAX_SHARD = 2**30  # bytes in memory; the format's own default is 2^26
_ARRAY = re.compile(r"ndarray:(u?int(?:8|16|32|64))(?::(\d+))?")


class _Shard(NamedTuple):
    """A shard's entry in the index. `sizes`: bytes of each column, 0 if they vary by sample."""

    raw: str
    num_bytes: int
    packed: str | None
    compression: str
    num_samples: int
    names: list[str]
    encodings: list[str]
    sizes: list[int]


def read_column(index: Path, column: str) -> Iterator[bytes | np.ndarray]:
    """The values of `column`, sample by sample: bytes (encodings `str` and `bytes`), or integers
    [T] (`ndarray:uint32` and the like). One shard at a time is in memory. Raises `DataError` for a
    file that is damaged, outside the folder or pickled, and for a column that is absent or of
    another encoding."""
    for shard in _shards(index):
        position = _checked_column(index, shard, column)
        path, data = _content(index.parent, shard)
        for number, sample in enumerate(_samples(path, data, shard)):
            where = f"{path}, sample {number}"
            value = _value(where, sample, shard.sizes, position)
            array = _ARRAY.fullmatch(shard.encodings[position])
            yield value.tobytes() if array is None else _integers(where, value, array)


def _shards(index: Path) -> list[_Shard]:
    try:
        entries = read_json(index)["shards"]
        formats = {(entry["format"], entry["version"]) for entry in entries}
        shards = [_shard(entry) for entry in entries]
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DataError(f"{index} is no index of MDS shards ({error!r}); write it again") from error
    if formats - {("mds", 2)}:
        raise DataError(f"{index} lists shards of format {formats}; only MDS version 2 is read")
    return shards


def _shard(entry: dict[str, Any]) -> _Shard:
    packed = entry["zip_data"]
    return _Shard(
        str(entry["raw_data"]["basename"]),
        int(entry["raw_data"]["bytes"]),
        packed and str(packed["basename"]),
        str(entry["compression"]) if packed else "",
        int(entry["samples"]),
        [str(name) for name in entry["column_names"]],
        [str(encoding) for encoding in entry["column_encodings"]],
        [int(size or 0) for size in entry["column_sizes"]],
    )


def _checked_column(index: Path, shard: _Shard, column: str) -> int:
    """The position of `column`, after a check of all columns."""
    problem = None
    if not len(shard.names) == len(shard.encodings) == len(shard.sizes):
        problem = "columns without a name, an encoding or a size: write it again"
    elif any(encoding.split(":")[0] == "pkl" for encoding in shard.encodings):
        problem = "pickled columns, which can run code: write it again without 'pkl'"
    elif column not in shard.names:
        problem = f"no column {column!r}, only {', '.join(shard.names)}: name one by --field"
    if problem:
        raise DataError(f"{index} has {problem}")
    encoding = shard.encodings[shard.names.index(column)]
    if encoding not in ("str", "bytes") and not _ARRAY.fullmatch(encoding):
        raise DataError(
            f"column {column!r} of {index} has encoding {encoding!r}; read are str, bytes and "
            "one-dimensional ndarray:uint32 (or another integer): name another column by --field"
        )
    return shard.names.index(column)


def _content(folder: Path, shard: _Shard) -> tuple[Path, np.ndarray]:
    for name in filter(None, (shard.raw, shard.packed)):
        if not is_file_name(name):
            raise DataError(f"{folder / INDEX} lists {name!r}, outside its folder: do not use it")
    path = folder / shard.raw
    if shard.packed and not path.is_file():
        path = folder / shard.packed
        if shard.compression.split(":")[0] != "zstd":
            raise DataError(
                f"{path} has compression {shard.compression!r}; only zstd is read: decompress it"
            )
    if not path.is_file():
        raise DataError(f"no shard at {path}: copy it again")
    if not 0 <= shard.num_bytes <= _MAX_SHARD:
        raise DataError(
            f"{path} holds {shard.num_bytes} bytes, a shard may have {_MAX_SHARD}: write it again "
            "with a smaller size_limit"
        )
    with unpacked(path) as file:
        data = np.frombuffer(file.read(shard.num_bytes + 1), np.uint8)
    if data.size != shard.num_bytes:
        raise DataError(
            f"{path} holds {data.size} bytes, its index says {shard.num_bytes}: copy it again"
        )
    return path, data


def _samples(path: Path, data: np.ndarray, shard: _Shard) -> Iterator[np.ndarray]:
    size = shard.num_samples + 2
    header = data[: data.size // 4 * 4].view("<u4")[:size].astype(np.int64)
    if size < 2 or header.size != size or header[0] != shard.num_samples:
        raise DataError(f"{path} does not hold the {shard.num_samples} samples of its index")
    offsets = header[1:]
    if offsets[0] < 4 * size or offsets[-1] != data.size or np.any(np.diff(offsets) < 0):
        raise DataError(f"{path} is damaged, its samples do not follow each other: copy it again")
    for start, stop in itertools.pairwise(offsets):
        yield data[start:stop]


def _value(where: str, sample: np.ndarray, sizes: list[int], position: int) -> np.ndarray:
    head = sample[: 4 * sizes.count(0)]
    if head.size == 4 * sizes.count(0):
        variable = iter(head.view("<u4").tolist())
        sizes = [size or next(variable) for size in sizes]
        start = head.size + sum(sizes[:position])
        if head.size + sum(sizes) == sample.size:
            return sample[start : start + sizes[position]]
    raise DataError(f"{where} is damaged, its columns do not fill it: copy the shard again")


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
        raise DataError(f"{where} holds no one-dimensional array of {array[1]}: write it as one")
    return values.view(dtype)
