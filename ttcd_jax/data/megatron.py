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

from ttcd_jax.errors import DataError

_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_DOCUMENTS = 2**16  # of which the index is in memory


def read_sequences(index: Path) -> Iterator[np.ndarray]:
    """The ids [T] of each document, memory-mapped. Raises `DataError` unless the sizes, offsets and
    documents in the index fill both files exactly."""
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(b"MMIDIDX\0\0"):
        _refuse(index, "does not begin as an index of Megatron-LM")
    _, version, code, num_sequences, num_starts = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        _refuse(index, f"has version {version} and dtype {code}; read are 1 and {[*_DTYPES]}")
    num_bytes = _HEADER.size + 12 * num_sequences + 8 * num_starts
    if num_bytes != index.stat().st_size or not num_sequences or not num_starts:
        _refuse(
            index,
            f"has {index.stat().st_size} bytes, and {num_sequences} sequences in documents with "
            f"{num_starts} ends take {num_bytes}",
        )
    sizes = np.memmap(index, "<i4", "r", _HEADER.size, num_sequences)
    offsets = np.memmap(index, "<i8", "r", _HEADER.size + 4 * num_sequences, num_sequences)
    starts = np.memmap(index, "<i8", "r", _HEADER.size + 12 * num_sequences, num_starts)
    if starts[0] != 0 or starts[-1] != num_sequences:
        _refuse(index, f"has documents {starts[0]} to {starts[-1]} of {num_sequences} sequences")
    path, dtype = index.with_suffix(".bin"), np.dtype(_DTYPES[code])
    if path.stat().st_size == 0 or path.stat().st_size % dtype.itemsize:
        _refuse(path, f"has {path.stat().st_size} bytes, no whole number of {dtype.name} ids")
    ids, end = np.asarray(np.memmap(path, dtype, "r")), 0
    for block in range(0, num_starts - 1, _DOCUMENTS):
        firsts = np.array(starts[block : block + _DOCUMENTS + 1])
        if np.any(firsts[:-1] > firsts[1:]) or not 0 <= firsts[0] <= firsts[-1] <= num_sequences:
            _refuse(index, f"has documents in disorder after document {block}")
        lengths = sizes[firsts[0] : firsts[-1]]
        ends = np.full(lengths.size + 1, end)
        ends[1:] += np.cumsum(lengths, dtype=np.int64)
        end = int(ends[-1])
        is_dense = np.array_equal(offsets[firsts[0] : firsts[-1]], ends[:-1] * dtype.itemsize)
        if not is_dense or np.any(lengths < 0) or end > ids.size:
            _refuse(index, f"has sequences that do not fill {path} after document {block}")
        for pair in itertools.pairwise(ends[firsts - firsts[0]].tolist()):
            yield ids[slice(*pair)]
    if end != ids.size:
        _refuse(path, f"has {ids.size} ids, its index has {end}")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise DataError(f"{path} {problem}; copy both files again")
