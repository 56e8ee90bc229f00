"""Memories of texts as objects: kept without the windows, added, put into a fresh state, or written
into the down projections for good. docs/memories.md has examples, and which sums are exact."""

import dataclasses
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from ttcd_jax.errors import UserError
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.inference.prefill import prefill
from ttcd_jax.inference.saved_state import Facts, Sealed, model_facts, other_model
from ttcd_jax.inference.state import InferenceState, start_state
from ttcd_jax.memory.pieces import OpenChunk
from ttcd_jax.memory.prefix import SumMemory
from ttcd_jax.methods.in_place import InPlaceMLP
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.train import layers_on_disk as disk


@dataclasses.dataclass(frozen=True, eq=False)
class TextMemory:
    """What texts left in the memories of a model: S [F, D] of every layer by its name, without eta,
    in the dtype of states; how many tokens all its texts had; and which model read them. Sums,
    differences and multiples are those of S. Raises `UserError` for memories of two models."""

    layers: Mapping[str, Float[np.ndarray, "F D"]]
    tokens_read: int
    facts: Facts

    def __add__(self, other: "TextMemory") -> "TextMemory":
        return self._with(other, operator.add)

    def __radd__(self, other: object) -> "TextMemory":
        return self if other == 0 else NotImplemented  # where `sum` begins

    def __sub__(self, other: "TextMemory") -> "TextMemory":
        return self._with(other, operator.sub)

    def __mul__(self, factor: float) -> "TextMemory":
        layers = {name: s * s.dtype.type(factor) for name, s in self.layers.items()}
        return dataclasses.replace(self, layers=layers)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "TextMemory":
        return self * (1 / divisor)

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.layers.values())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the memory atomically as `folder`, which must be absent or empty. Raises
        `CheckpointError` when it cannot be written."""
        Sealed(folder, "memory").save(self.layers, self.facts | {"tokens_read": self.tokens_read})

    def check(self, facts: Facts) -> None:
        """Raises `UserError` for another model than the one that read it, naming what differs."""
        if problem := other_model(self.facts, facts):
            raise UserError(f"the memory {problem}")

    def _with(self, other: object, combine: Callable) -> "TextMemory":
        if not isinstance(other, TextMemory):
            return NotImplemented
        other.check(self.facts)
        layers = {name: combine(s, other.layers[name]) for name, s in self.layers.items()}
        return TextMemory(layers, self.tokens_read + other.tokens_read, self.facts)


def mean(memories: Sequence[TextMemory]) -> TextMemory:
    if not memories:
        raise UserError("the mean of no memory: give one or more")
    return sum(memories[1:], memories[0]) / len(memories)


def read_memory(
    model: InferenceModel, tokens: np.ndarray, before: TextMemory | None = None
) -> TextMemory:
    """The memory of a text, tokens [T]; of one that is read with the memory `before` and an empty
    window, both. Its last chunk is written whether it is full or not."""
    most = len(tokens) if model.config.window is None else None
    state = start_state(model, 1, max_length=most)
    if before is not None:
        state = start_from(model, [before], max_length=most)
    (memory,) = memories_of(model, prefill(model, state, np.asarray(tokens)[None])[1])
    count = memory.tokens_read + (before.tokens_read if before else 0)
    return dataclasses.replace(memory, tokens_read=count)


def memories_of(model: InferenceModel, state: InferenceState) -> list[TextMemory]:
    """The memory of every row of a state, with what its open chunk would write now. Raises
    `UserError` for a model whose memories are not matrices that add up."""
    arrays, facts = jax.device_get(_written(model, state)), model_facts(model)
    return [
        TextMemory({name: s[row] for name, s in arrays.items()}, int(count), facts)
        for row, count in enumerate(state.position)
    ]


def load_memory(folder: str | os.PathLike[str], model: InferenceModel) -> TextMemory:
    """The memory that `TextMemory.save` wrote, bit for bit. Raises `CheckpointError` for a folder
    that is none or is damaged, and for a memory of another model, naming the difference."""
    arrays, facts = (sealed := Sealed(folder, "memory")).load(model)
    kept, dtype = _layers(model).items(), model.config.precision.state_dtype
    wanted = {name: jax.ShapeDtypeStruct(mlp.down.shape, dtype) for name, (*_, mlp) in kept}
    sealed.check(arrays, wanted)
    if type(count := facts.pop("tokens_read", None)) is not int:
        sealed.refuse(f"has tokens_read {count!r:.20} in {sealed.record}; read the text again")
    return TextMemory(arrays, count, facts)


def start_from(
    model: InferenceModel, memories: Sequence[TextMemory], *, max_length: int | None = None
) -> InferenceState:
    """`start_state` of a row for each of the memories, which its tokens read from the first one on,
    and write."""
    facts = model_facts(model)
    for memory in memories:
        memory.check(facts)
    state = start_state(model, len(memories), max_length=max_length)
    layers = [dict(before) for before in state.layers]
    for name, (layer, key, _) in _layers(model).items():
        before: Any = layers[layer][key]
        rows = np.stack([memory.layers[name] for memory in memories])
        rows = jax.device_put(rows, before.chunks.memory.sharding)
        layers[layer][key] = before._replace(chunks=OpenChunk(rows, before.chunks.open))
    return state._replace(layers=tuple(layers))


def dense(model: Transformer, memory: TextMemory) -> Transformer:
    """The plain transformer whose down projections are W_base + eta S, added in the dtype of S: on
    any tokens the `model` with this memory frozen, under the teacher's window. Raises `UserError`
    where a read is no product of a token's own features with one matrix (docs/memories.md)."""
    config, own = model.config, inference_model(model)
    memory.check(model_facts(own))
    has_gap = config.window is None or config.student_window < config.window
    precision = config.precision
    dtype: Any = jnp.promote_types(precision.param_dtype, precision.state_dtype).name
    plain = config.replace(
        **{"method": "full" if config.window is None else "swa", "fast_layers": (), "memory": None},
        precision=precision.replace(param=dtype),
    )
    rows = disk.unstacked(config, disk.by_name(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    rows = {name: rows[name].astype(dtype) for name in disk.stored_params(plain)}
    for name, (*_, mlp) in _layers(own).items():
        weight = rows[f"{name}/down"] + mlp.settings.eta * memory.layers[name]
        rows[f"{name}/down"] = mlp.read_scale(has_gap)[:, None].astype(dtype) * weight
    return disk.model_of(plain, rows)


def _layers(model: InferenceModel) -> dict[str, tuple[int, str, InPlaceMLP]]:
    """Every memory by its name: the number of its layer, its name in it, its MLP. Raises
    `UserError` for a model with others than sums and delta rules in down projections."""
    blocks = enumerate(model.modules)
    parts = ((i, name, getattr(x, name)) for i, x in blocks for name in x.config.order)
    found = {f"layers/{i}/{x}": (i, x, y) for i, x, y in parts if isinstance(y, InPlaceMLP)}
    memories = (mlp.memory(mlp.settings.chunk_size) for *_, mlp in found.values())
    if not found or not all(isinstance(memory, SumMemory) for memory in memories):
        raise UserError(
            f"a model of {model.config.label} (method {model.config.method!r}) has no memory that "
            "is a sum or a delta rule in a down projection: save its state"
        )
    return found


@jax.jit
def _written(model: InferenceModel, state: InferenceState) -> dict[str, Float[Array, "B F D"]]:
    found = _layers(model).items()
    count, layers = state.position - state.chunk_start, cast(Any, state.layers)
    return {x: mlp.written(layers[i][key], count) for x, (i, key, mlp) in found}
