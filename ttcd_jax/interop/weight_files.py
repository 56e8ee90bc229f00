"""The tensors of a checkpoint on disk: one .safetensors file, or several with an index; or, with
torch installed, a file of torch.

A .safetensors file is 8 bytes (the header's length, little endian), the header (JSON: name ->
dtype, shape, byte range), then the data. The library rejects a header that does not fit the file;
duplicate names, control characters in names, and NaN are rejected here.
"""

import dataclasses
import importlib
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import parse_json, reach_of_links, read_index, whole_file, write_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_NAME = 256
_MAX_HEADER = 20_000_000  # bytes: more than 100,000 tensors
_REMEDY = "save the model with save_pretrained(safe_serialization=True)"
_TORCH, _TORCH_SUFFIXES = "pytorch_model.bin", (".bin", ".pt", ".pth")
# Exceptions of torch for damaged files, determined by damaging one at many positions.
_TORCH_ERRORS = (
    *(pickle.UnpicklingError, struct.error, RuntimeError, ValueError, OSError, EOFError),
    *(LookupError, TypeError, AttributeError, AssertionError, ArithmeticError),
)


class StoredTensor(NamedTuple):
    """The file, dtype and shape of a tensor, known before it is read."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class WeightFiles(Mapping[str, np.ndarray]):
    """The tensors of a checkpoint by name, each read on access in the dtype of its file. Reading
    one with NaN or infinity raises `DataError`."""

    stored: dict[str, StoredTensor]
    read: Callable[[str], np.ndarray]
    files: tuple[Path, ...]

    def __getitem__(self, name: str) -> np.ndarray:
        value = self.read(name)
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
    """The tensors of a checkpoint folder or of one file; of .safetensors nothing but headers is
    read yet. Raises `DataError` naming a file, and a tensor, that is missing or damaged."""
    if path.is_file():
        if path.suffix in _TORCH_SUFFIXES:
            return _of_torch(path)
        if path.suffix != ".safetensors":
            raise DataError(f"{path} is no .safetensors file: {_REMEDY}")
        return _opened([path])
    if not path.is_dir():
        raise DataError(f"no checkpoint file or folder at {path}")
    first, *others = [*(path / x for x in (SINGLE, INDEX, _TORCH) if (path / x).is_file()), None]
    if first is None:
        dcp = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pt"
        remedy = dcp if (path / ".metadata").is_file() else _REMEDY
        raise DataError(f"{path} holds none of {SINGLE}, {INDEX}, {_TORCH}: {remedy}")
    if path / INDEX in others:
        raise DataError(f"{path} holds {SINGLE} and {INDEX}: remove the one that is out of date")
    _check_link(first)
    return _indexed(first) if first.name == INDEX else open_weights(first)


def _of_torch(path: Path) -> WeightFiles:
    """The state dict in a file of torch; a training checkpoint has it under `model`."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise UserError(f"{path} needs torch: install it, or {_REMEDY}") from error
    try:
        # Tensors and plain containers only: a pickle that would call anything is refused.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except _TORCH_ERRORS as error:
        # torch's own message advises loading the file anyway, code included.
        kind = type(error).__name__
        raise DataError(f"{path} is damaged or holds more than weights ({kind})") from error
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    if not isinstance(state, dict) or not state:
        raise DataError(f"{path} holds no state dict")
    arrays = {_named(path, name): _array(torch, path, name, x) for name, x in state.items()}
    stored = {name: StoredTensor(path, x.dtype, x.shape) for name, x in sorted(arrays.items())}
    return WeightFiles(stored, arrays.__getitem__, (path,))


def _array(torch: Any, path: Path, name: str, tensor: Any) -> np.ndarray:
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    if not is_dense or tensor.dtype not in kinds:
        kind = getattr(tensor, "dtype", type(tensor).__name__)
        raise DataError(f"{path}: {name!r} is {kind}, not a dense tensor of {kinds}")
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy has none: view the bits
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _indexed(index: Path) -> WeightFiles:
    """The tensors of the shards that an index names; both must have the same tensors."""
    weight_map = read_index(index)
    files = [index.parent / shard for shard in sorted({*weight_map.values()})]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is missing: {INDEX} names it")
        _check_link(file)
    weights = _opened(files)
    holders = {name: tensor.file.name for name, tensor in weights.stored.items()}
    for name in sorted(holders.keys() | weight_map.keys()):
        listed, actual = weight_map.get(name), holders.get(name)
        if listed != actual:
            raise DataError(f"{index}: tensor {name!r} is in {actual}, and the index says {listed}")
    return weights


def _check_link(file: Path) -> None:
    if not file.resolve().is_relative_to(reach_of_links(file.parent)):
        remedy = "copy the folder with the files themselves (cp -rL)"
        raise DataError(f"{file} is a link that leaves its folder: {remedy}")


def _opened(files: Sequence[Path]) -> WeightFiles:
    stored: dict[str, StoredTensor] = {}
    for file in files:
        tensors = _stored_in(file)
        for name in sorted(stored.keys() & tensors.keys()):
            raise DataError(f"tensor {name!r} is in {stored[name].file.name} and in {file}")
        stored |= tensors

    def read(name: str) -> np.ndarray:
        # Opened anew: a file stays mapped while its handle lives, and pages once read with it.
        with safe_open(stored[name].file, framework="np") as handle:
            return handle.get_tensor(name)

    return WeightFiles(dict(sorted(stored.items())), read, tuple(files))


def _stored_in(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if _MAX_HEADER < length < file.stat().st_size:
                raise DataError(f"{file}: a header of {length:,} bytes, at most {_MAX_HEADER:,}")
            safe_open(file, framework="np")  # refuses a longer one than the file
            header = parse_json(stream.read(length), file)
    except (SafetensorError, OSError) as error:
        reason = str(error)[:_MAX_NAME].encode("unicode_escape").decode()  # it quotes the file
        raise DataError(f"{file} is truncated, damaged or no safetensors file: {reason}") from error
    header.pop("__metadata__", None)
    stored = {}
    for name, entry in header.items():
        if (dtype := _DTYPES.get(entry["dtype"])) is None:
            raise DataError(
                f"{file}: tensor {name!r} has dtype {entry['dtype']}, only {', '.join(_DTYPES)} "
                "are read: save the checkpoint in one of these"
            )
        stored[_named(file, name)] = StoredTensor(file, dtype, tuple(entry["shape"]))
    return stored


def _named(file: Path, name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
        raise DataError(f"{file}: {str(name)[:_MAX_NAME]!r} is not a tensor name")
    return name


def cast(tensors: Mapping[str, np.ndarray], kinds: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Every tensor in the dtype of its name in `kinds`. Raises `UserError` for a value that it
    cannot hold."""
    result = {}
    for name, tensor in tensors.items():
        with np.errstate(over="ignore"):  # reported by name below
            result[name] = tensor.astype(kinds[name])
        if not np.isfinite(result[name]).all():
            raise UserError(
                f"{name} has values that {kinds[name]} cannot hold (largest "
                f"{np.abs(tensor).max():g}): choose another --dtype"
            )
    return result


def write_safetensors(
    folder: Path, tensors: Mapping[str, np.ndarray], max_shard_bytes: int = 5_000_000_000
) -> list[Path]:
    """Writes `model.safetensors`, or shards of at most `max_shard_bytes` (or one tensor) and their
    index last; returns the files. Raises `UserError` when one cannot be written."""
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    files = []
    for name, names in split.filename_to_tensors.items():
        # The library writes the buffer under a view: a transpose must be made contiguous.
        arrays = {x: np.ascontiguousarray(tensors[x]).reshape(tensors[x].shape) for x in names}
        files.append(folder / name)
        try:
            with whole_file(files[-1]) as unfinished:
                save_file(arrays, unfinished, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"cannot write {files[-1]}: {error}; choose another folder") from error
    if split.is_sharded:
        files.append(folder / INDEX)
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(files[-1], index)
    return files
