"""The tensors of a checkpoint on disk: one .safetensors file, or several behind an index.

A file is 8 bytes (the header's length, little endian), the header (JSON: name -> dtype, shape,
byte range), then the data without holes. The header is checked here, against the file's real size,
before the library maps the file: nothing is allocated because a header says so.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import whole_file, write_json
from ttcd_jax.interop.strict_json import MAX_BYTES, parse_json, read_json_file
from ttcd_jax.interop.torch_files import TORCH_SUFFIXES, read_torch_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH = "pytorch_model.bin"
SHARD_BYTES = 5_000_000_000  # what Hugging Face writes into one file

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_MAX_NAME = 256
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")


class StoredTensor(NamedTuple):
    """Where a tensor lies, and what it is before anything is read."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]


class WeightFiles(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint by name, sorted, each read from its file when it is asked for.

    `stored` tells file, dtype and shape of each, `files` what was opened. An array has the file's
    own dtype; reading one that holds NaN or infinity is a `DataError`.
    """

    def __init__(
        self,
        stored: dict[str, StoredTensor],
        read: Callable[[str], np.ndarray],
        files: tuple[Path, ...],
    ) -> None:
        self.stored = dict(sorted(stored.items()))
        self.files = files
        self._read = read

    def __getitem__(self, name: str) -> np.ndarray:
        value = self._read(name)
        if not np.isfinite(value).all():
            raise DataError(
                f"tensor {name!r} of {self.stored[name].file} holds NaN or infinity: the "
                "checkpoint is damaged or its training diverged"
            )
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def open_weights(path: Path) -> WeightFiles:
    """The tensors of a checkpoint folder, of one .safetensors file, or of a torch file (.bin, .pt;
    with torch installed).

    Raises:
        DataError: a file that is missing, damaged, or says what cannot be, with file and tensor.
        UserError: a torch file without torch.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise DataError(f"no checkpoint file or folder at {path}")
    if path.suffix in TORCH_SUFFIXES:
        return _open_torch(path)
    if path.suffix != ".safetensors":
        raise DataError(f"{path} is neither a folder nor a .safetensors, .bin or .pt file")
    return _open_safetensors({path: _header(path)})


def _open_folder(folder: Path) -> WeightFiles:
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise DataError(f"{folder} holds {SINGLE} and {INDEX}: remove the one that is out of date")
    if single.is_file():
        return _open_safetensors({single: _header(single)})
    if index.is_file():
        return _open_safetensors(_indexed_headers(index))
    if (folder / TORCH).is_file():
        return _open_torch(folder / TORCH)
    if (folder / ".metadata").is_file():
        raise DataError(
            f"{folder} is a distributed torch checkpoint: make one file of it first, python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
        )
    raise DataError(f"{folder} holds none of {SINGLE}, {INDEX}, {TORCH}")


def _open_torch(path: Path) -> WeightFiles:
    arrays = read_torch_file(path)
    stored = {name: StoredTensor(path, x.dtype, x.shape) for name, x in arrays.items()}
    return WeightFiles(stored, arrays.__getitem__, (path,))


def _open_safetensors(headers: dict[Path, dict[str, StoredTensor]]) -> WeightFiles:
    stored: dict[str, StoredTensor] = {}
    for file, header in headers.items():
        for name, tensor in header.items():
            if name in stored:
                raise DataError(f"tensor {name!r} is in {stored[name].file.name} and in {file}")
            stored[name] = tensor
    handles = {}
    for file in headers:
        try:
            handles[file] = safe_open(file, framework="np")
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file} is not a usable safetensors file: {error}") from error

    def read(name: str) -> np.ndarray:
        return handles[stored[name].file].get_tensor(name)

    return WeightFiles(stored, read, tuple(headers))


def _indexed_headers(index: Path) -> dict[Path, dict[str, StoredTensor]]:
    """The headers of the shards that an index names; both must tell of the same tensors."""
    weight_map = read_json_file(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{index} has no weight_map of tensor names to files")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _PLAIN_NAME.fullmatch(shard):
            raise DataError(f"{index}: tensor {name!r} in {shard!r}, which is no plain file name")
        shards.setdefault(shard, set()).add(name)
    headers = {}
    for shard, names in sorted(shards.items()):
        file = _inside(index.parent, shard)
        headers[file] = _header(file)
        for name in sorted(names ^ headers[file].keys()):
            where = "not in that file" if name in names else f"in that file, not in {INDEX}"
            raise DataError(f"{file}: tensor {name!r} is {where}")
    return headers


def _inside(folder: Path, name: str) -> Path:
    file = folder / name
    if not file.is_file():
        raise DataError(f"{file} is missing: {INDEX} names it")
    if file.resolve().parent != folder.resolve():
        raise DataError(
            f"{file} is a link that leaves its folder: copy the folder with the files themselves "
            "(cp -rL)"
        )
    return file


def _header(file: Path) -> dict[str, StoredTensor]:
    """What the header of a safetensors file says, checked against the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if start[:2] == b"PK" or start[:1] == b"\x80":
                raise DataError(f"{file} is a pickle of torch under another name: it is not read")
            if len(start) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
                raise DataError(
                    f"{file} is cut off or no safetensors file: a header of {length} bytes in a "
                    f"file of {size}"
                )
            if length > MAX_BYTES:
                raise DataError(f"{file}: a header of {length} bytes, at most {MAX_BYTES} are read")
            source = parse_json(stream.read(length), file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    source.pop(_METADATA, None)
    return _stored_tensors(file, source, size - _LENGTH_BYTES - length)


def _stored_tensors(file: Path, source: dict[str, Any], size: int) -> dict[str, StoredTensor]:
    """The tensors of a header; their byte ranges cover the `size` bytes of data exactly."""
    tensors, ranges = {}, []
    for name, entry in source.items():
        if not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
            raise DataError(f"{file}: {name[:_MAX_NAME]!r} is no tensor name")
        tensors[name], begin, end = _stored_tensor(file, name, entry)
        ranges.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(ranges):
        if begin != reached or end > size:
            raise DataError(
                f"{file}: tensor {name!r} lies in bytes {begin} .. {end} of {size}, the one before "
                f"it ends at {reached}: damaged or cut off"
            )
        reached = end
    if reached != size:
        raise DataError(f"{file}: {size - reached} bytes behind the last tensor belong to none")
    return tensors


def _stored_tensor(file: Path, name: str, entry: Any) -> tuple[StoredTensor, int, int]:
    """(tensor, first byte, byte behind the last) of one entry of a header."""
    where = f"{file}: tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{where} is not told by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise DataError(
            f"{where} has dtype {str(dtype)[:20]!r}, only {', '.join(_DTYPES)} are read: save the "
            "checkpoint in one of these"
        )
    if not _are_sizes(shape, least=1):
        raise DataError(f"{where} has no shape of whole numbers, 1 or more each")
    if not _are_sizes(offsets, least=0) or len(offsets) != 2:
        raise DataError(f"{where} has no data_offsets [begin, end]")
    (begin, end), need = offsets, math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != need:
        raise DataError(f"{where} has {end - begin} bytes, its dtype and shape need {need}")
    return StoredTensor(file, _DTYPES[dtype], tuple(shape)), begin, end


def _are_sizes(value: Any, least: int) -> bool:
    """Whether `value` is a short list of whole numbers that a file's size can reach."""
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(item) is int and least <= item < 2**63 for item in value)
    )


def write_safetensors(
    folder: Path, tensors: Mapping[str, np.ndarray], max_shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Writes `model.safetensors`, or shards of at most `max_shard_bytes` (one tensor at least) and
    their index last; returns the files. Raises `UserError` when one cannot be written."""
    if not tensors:
        raise UserError(f"no tensors to write into {folder}")
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        return [_write(folder / SINGLE, tensors, shards[0])]
    files, weight_map = [], {}
    for number, names in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(_write(file, tensors, names))
        weight_map |= dict.fromkeys(names, file.name)
    total = sum(tensors[name].nbytes for name in weight_map)
    source = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX, source)
    return [*files, folder / INDEX]


def _shards(tensors: Mapping[str, np.ndarray], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name in tensors:
        size = tensors[name].nbytes
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write(file: Path, tensors: Mapping[str, np.ndarray], names: list[str]) -> Path:
    # The library writes the buffer under a view as it is: a transpose must be made contiguous.
    own = {name: np.ascontiguousarray(tensors[name]).reshape(tensors[name].shape) for name in names}
    try:
        with whole_file(file) as unfinished:
            save_file(own, unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"cannot write {file}: {error}; choose another place") from error
    return file
