"""The decoding state on disk (`sealed`), so that a long text is read once and continued later."""

import os

import jax
import numpy as np

from ttcd_jax.inference import state as states
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.sealed import Sealed, model_facts
from ttcd_jax.train.layers_on_disk import by_name


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
            start = states.frozen(model, start)[1]
        sealed.check(arrays, by_name(start))
    placed = [jax.device_put(arrays[x], leaf.sharding) for x, leaf in by_name(start).items()]
    return jax.tree.unflatten(jax.tree.structure(start), placed)
