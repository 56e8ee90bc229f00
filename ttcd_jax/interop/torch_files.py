"""The tensors of a torch file (.bin, .pt), read without running code in its pickle."""

import importlib
import pickle
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ttcd_jax.errors import DataError, UserError

TORCH_SUFFIXES = (".bin", ".pt", ".pth")
# Exceptions of torch for damaged files, determined by damaging one at many positions.
_READ_ERRORS = (
    *(pickle.UnpicklingError, struct.error, RuntimeError, ValueError, OSError, EOFError),
    *(LookupError, TypeError, AttributeError, AssertionError, ArithmeticError),
)


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a state dict by name; a training checkpoint has it under `model`. Raises
    `UserError` without torch, `DataError` unless all are float32, float16 and bfloat16 tensors."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{path} is a torch file and torch is not installed: install it, or save the "
            "checkpoint as .safetensors"
        ) from error
    try:
        # Tensors and plain containers only: a pickle that would call anything is refused.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except _READ_ERRORS as error:
        # torch's own message advises loading the file anyway, code included.
        raise DataError(
            f"{path} is damaged or holds more than weights ({type(error).__name__}): save the "
            "state dict alone, or as .safetensors"
        ) from error
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    if not isinstance(state, dict) or not state:
        raise DataError(f"{path} holds no state dict")
    return {name: _array(torch, path, name, state[name]) for name in state}


def _array(torch: Any, path: Path, name: Any, tensor: Any) -> np.ndarray:
    if not isinstance(name, str) or not name.isprintable():
        raise DataError(f"{path}: {name!r} is not a tensor name")
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise DataError(f"{path}: {name!r} is a {type(tensor).__name__}, not a dense tensor")
    if tensor.dtype == torch.bfloat16:  # numpy has none: view the bits
        return tensor.detach().contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype not in (torch.float32, torch.float16):
        raise DataError(
            f"{path}: tensor {name!r} has dtype {tensor.dtype}, only float32, float16 and bfloat16 "
            "are read"
        )
    return tensor.detach().contiguous().numpy()
