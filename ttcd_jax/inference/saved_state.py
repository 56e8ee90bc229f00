"""What a text left on disk, so that it is read once: the decoding state, or the memory alone.

state.safetensors   the arrays      state.json   the model, and how many tokens each row has read
DIGEST.json         sizes and SHA-256 of both
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ttcd_jax import storage
from ttcd_jax.config import differences
from ttcd_jax.errors import CheckpointError, DataError, UserError, listed
from ttcd_jax.files import read_json, whole_file, whole_folder, write_json
from ttcd_jax.inference import state as states
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.train import digest
from ttcd_jax.train.layers_on_disk import by_name, misfit

Facts = dict[str, Any]  # of a record; `model` and `parameters` say which model


def model_facts(model: InferenceModel) -> Facts:
    """The configuration of a model, and the SHA-256 of all its parameters with names and dtypes."""
    sha256 = hashlib.sha256()
    for name, leaf in by_name(model).items():
        array = np.asarray(leaf)
        sha256.update(f"{name} {array.dtype} {array.shape}\n".encode())
        sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return {"parameters": sha256.hexdigest(), "model": model.config.to_dict()}


def other_model(found: Facts, wanted: Facts) -> str | None:
    """What tells apart the models of two facts, None if it is one."""
    if changed := differences(found.get("model"), wanted["model"]):
        changes = listed(changed)
        return f"is of a model of another configuration: {changes}; load it with its own model"
    theirs, ours = found.get("parameters"), wanted["parameters"]
    if theirs == ours:
        return None
    return (
        f"is of other parameters of the same configuration, {theirs!s:.12} not {ours:.12}: load it "
        "with the checkpoint that made it, perhaps another step of the run"
    )


class Sealed:
    """The folder of a `kind`. Raises `CheckpointError` for all that is wrong with it."""

    def __init__(self, folder: str | os.PathLike[str], kind: str) -> None:
        self.folder, self.kind = storage.to_path(folder).absolute(), kind
        self.arrays, self.record = f"{kind}.safetensors", f"{kind}.json"

    def save(self, arrays: Mapping[str, Any], facts: Facts) -> None:
        """Writes the folder, which must be absent or empty."""
        # The library writes the buffer under a view: a transpose must be made contiguous.
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        try:
            with whole_folder(self.folder) as unfinished:
                with whole_file(unfinished / self.arrays) as file:
                    save_file(arrays, file)
                write_json(unfinished / self.record, facts)
                digest.seal(unfinished)
        except (UserError, SafetensorError) as error:
            problem = f"the {self.kind} cannot be saved as {self.folder}: {error}"
            raise CheckpointError(problem) from error

    def load(self, model: InferenceModel) -> tuple[dict[str, np.ndarray], Facts]:
        if not (storage.fetch(self.folder) / self.record).is_file():
            raise CheckpointError(f"{self.folder} is no saved {self.kind}: it has no {self.record}")
        if problems := digest.verify(self.folder):
            self.refuse(f"is damaged: {'; '.join(problems)}; read the text again")
        try:
            facts = read_json(self.folder / self.record)
            arrays = load_file(self.folder / self.arrays)
        except (DataError, SafetensorError, AttributeError) as error:  # numpy lacks the dtype
            self.refuse(f"cannot be read: {error}")
        if problem := other_model(facts, model_facts(model)):
            self.refuse(problem)
        return arrays, facts

    def check(self, arrays: Mapping[str, np.ndarray], wanted: Mapping[str, Any]) -> None:
        if problem := misfit(wanted, arrays, ("shape", "dtype")):
            self.refuse(f"is of another version of this library: {problem}; read the text again")

    def refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(f"the saved {self.kind} {self.folder} {problem}")


def save_state(
    folder: str | os.PathLike[str], model: InferenceModel, state: states.InferenceState
) -> None:
    """Writes `state` atomically as `folder`, which must be absent or empty. Raises
    `CheckpointError` when it cannot be written."""
    facts = model_facts(model) | {
        "tokens_read": np.asarray(state.position).tolist(),
        "max_length": states.cache_slots(state) if model.config.window is None else None,
        "is_frozen": states.is_frozen(state),
    }
    Sealed(folder, "state").save(by_name(state), facts)


def load_state(folder: str | os.PathLike[str], model: InferenceModel) -> states.InferenceState:
    """The state that `save_state` wrote, bit for bit, on the mesh in use if there is one. Raises
    `CheckpointError` for a folder that is not a saved state or is damaged, naming the file, and for
    a state of another model, naming the difference."""
    arrays, facts = (sealed := Sealed(folder, "state")).load(model)
    rows, slots = facts.get("tokens_read"), facts.get("max_length")
    most = (sealed.folder / sealed.arrays).stat().st_size  # a row, or a slot, has bytes there
    is_sized = slots is None or (type(slots) is int and 0 < slots <= most)
    if not isinstance(rows, list) or not 0 < len(rows) <= most or not is_sized:
        sealed.refuse(f"has a {sealed.record} that describes no such arrays; read the text again")
    for make in (states.abstract_state, states.start_state):  # nothing is allocated before a check
        start = make(model, len(rows), max_length=slots)
        if facts.get("is_frozen") is True:
            start = states.read_only(model, start)
        sealed.check(arrays, by_name(start))
    placed = [jax.device_put(arrays[x], leaf.sharding) for x, leaf in by_name(start).items()]
    return jax.tree.unflatten(jax.tree.structure(start), placed)
