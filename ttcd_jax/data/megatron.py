"""Documents of token ids as Megatron-LM stores them: NAME.idx, and the ids in NAME.bin.

    NAME.idx   "MMIDIDX\\0\\0" | u64 version 1 | u8 dtype | u64 sequences n | u64 documents + 1
               int32 sizes [n] | int64 offsets in bytes [n] | int64 first sequences [documents + 1]
    NAME.bin   the sequences, end to end

All numbers are little-endian. A document is one sequence or several.
"""

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from ttcd_jax.data.compressed import bytes_read
from ttcd_jax.errors import DataError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_sequences(index: Path) -> Iterator[np.ndarray]:
    """The ids [T] of each document, memory-mapped. Raises `DataError` unless the sizes, offsets and
    documents in the index fill both files exactly."""
    with index.open("rb") as file:
        header = file.read(_HEADER.size).ljust(_HEADER.size, b"\0")
    magic, version, code, n, num_starts = _HEADER.unpack(header)
    if (magic, version) != (_MAGIC, 1) or code not in _DTYPES:
        _refuse(index, f"begins {magic}, {version}, {code}; read are {_MAGIC}, 1, {[*_DTYPES]}")
    size, path, dtype = index.stat().st_size, index.with_suffix(".bin"), np.dtype(_DTYPES[code])
    if size != (needed := _HEADER.size + 12 * n + 8 * num_starts) or 0 in (n, num_starts):
        _refuse(index, f"has {size} bytes; {n} sequences and {num_starts} documents take {needed}")
    if not (num_bytes := path.stat().st_size) or num_bytes % dtype.itemsize:
        _refuse(path, f"has {num_bytes} bytes, no whole number of {dtype.name} ids")
    sizes = np.memmap(index, "<i4", "r", _HEADER.size, n)
    offsets = np.memmap(index, "<i8", "r", _HEADER.size + 4 * n, n)
    starts = np.memmap(index, "<i8", "r", _HEADER.size + 12 * n, num_starts)
    ids, end = np.asarray(np.memmap(path, dtype, "r")), 0
    for number, (first, stop) in enumerate(itertools.pairwise(starts)):
        lengths, begin = sizes[first:stop], end
        end += int(lengths.sum(dtype=np.int64))
        is_sound = 0 <= first <= stop <= n and lengths.min(initial=0) >= 0 and end <= ids.size
        if not is_sound or (first < stop and offsets[first] != begin * dtype.itemsize):
            _refuse(index, f"does not fit {path} at document {number}")
        bytes_read((end - begin) * dtype.itemsize)
        yield ids[begin:end]
    if (starts[-1], end) != (n, ids.size):
        _refuse(path, f"has {ids.size} ids in {n} sequences, its documents {end} in {starts[-1]}")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise DataError(f"{path} {problem}; copy both files again")
