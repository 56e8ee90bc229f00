"""The decoding state on disk, so that a long text is read once and continued later.

state.safetensors   the arrays      state.json   the model, and how many tokens each row has read
DIGEST.json         sizes and SHA-256 of both
"""

import hashlib
import os
from typing import NoReturn

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ttcd_jax import storage
from ttcd_jax.config import differences
from ttcd_jax.errors import CheckpointError, DataError, UserError, listed
from ttcd_jax.files import read_json, whole_file, whole_folder, write_json
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.state import InferenceState, abstract_state, cache_slots, start_state
from ttcd_jax.train import digest
from ttcd_jax.train.layers_on_disk import by_name, misfit

_ARRAYS = "state.safetensors"
_RECORD = "state.json"


def save_state(
    folder: str | os.PathLike[str], model: InferenceModel, state: InferenceState
) -> None:
    """Writes `state` atomically as `folder`, which must be absent or empty. Raises
    `CheckpointError` when it cannot be written."""
    folder = storage.to_path(folder).absolute()
    record = {
        "tokens_read": np.asarray(state.position).tolist(),
        "max_length": cache_slots(state) if model.config.window is None else None,
        "parameters": _parameter_digest(model),
        "model": model.config.to_dict(),
    }
    # The library writes the buffer under a view: a transpose must be made contiguous.
    arrays = {name: np.ascontiguousarray(x) for name, x in by_name(state).items()}
    try:
        with whole_folder(folder) as unfinished:
            with whole_file(unfinished / _ARRAYS) as file:
                save_file(arrays, file)
            write_json(unfinished / _RECORD, record)
            digest.seal(unfinished)
    except (UserError, SafetensorError) as error:
        raise CheckpointError(f"the state cannot be saved as {folder}: {error}") from error


def load_state(folder: str | os.PathLike[str], model: InferenceModel) -> InferenceState:
    """The state that `save_state` wrote, bit for bit, on the mesh in use if there is one. Raises
    `CheckpointError` for a folder that is not a saved state or is damaged, naming the file, and for
    a state of another model, naming the difference."""
    folder = storage.copy_of(folder).absolute()

    def refuse(problem: str) -> NoReturn:
        raise CheckpointError(f"the saved state {folder} {problem}")

    if not (folder / _RECORD).is_file():
        raise CheckpointError(f"{folder} is no saved state: it has no {_RECORD}")
    if problems := digest.verify(folder):
        refuse(f"is damaged: {'; '.join(problems)}; read the text again")
    try:
        record, arrays = read_json(folder / _RECORD), load_file(folder / _ARRAYS)
    except (DataError, SafetensorError, AttributeError) as error:  # numpy lacks the dtype
        refuse(f"cannot be read: {error}")
    if changed := differences(record.get("model"), model.config.to_dict()):
        changes = listed(changed)
        refuse(f"is of a model of another configuration: {changes}; load it with its own model")
    if record.get("parameters") != _parameter_digest(model):
        refuse(
            "is of other parameters of the same configuration: load it with the checkpoint that "
            "made it, perhaps another step of the run"
        )
    rows, slots = record.get("tokens_read"), record.get("max_length")
    most = (folder / _ARRAYS).stat().st_size  # a row, or a slot, has bytes there
    is_sized = slots is None or (type(slots) is int and 0 < slots <= most)
    if not isinstance(rows, list) or not 0 < len(rows) <= most or not is_sized:
        raise CheckpointError(f"{folder / _RECORD} describes no {_ARRAYS}: read the text again")
    wanted = by_name(abstract_state(model, len(rows), max_length=slots))
    if problem := misfit(wanted, arrays, ("shape", "dtype")):
        refuse(f"is of another version of this library: {problem}; read the text again")
    start = start_state(model, len(rows), max_length=slots)
    placed = [jax.device_put(arrays[x], leaf.sharding) for x, leaf in by_name(start).items()]
    return jax.tree.unflatten(jax.tree.structure(start), placed)


def _parameter_digest(model: InferenceModel) -> str:
    """SHA-256 of all parameters with their names, dtypes and shapes."""
    sha256 = hashlib.sha256()
    for name, leaf in by_name(model).items():
        array = np.asarray(leaf)
        sha256.update(f"{name} {array.dtype} {array.shape}\n".encode())
        sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return sha256.hexdigest()
