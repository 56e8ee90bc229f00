"""The decoding state, of constant size however many tokens were read.

Elements per row and layer, with W the window (`max_length` of full attention), L the tokens of a
chunk, R the taps of a convolution; sums and running weights are in the state dtype (float32), all
else in the compute dtype:

    attention       2 (W + n) K H           keys and values, a ring, and those of n sinks
    IP-TTCD         F D                     the sum of delta_w of full chunks
                    L (F + D)               keys and errors of the open chunk: delta_w, unmultiplied
                    (R - 1) (2 F + 1)       features and rates that convolutions look back at
    IP-TTT          F D + L (F + D) + (R - 1) (F + D)
    ideal IP-TTCD   F D + 2 L F             the running weight, features of the open chunk
    of the stream   F D + L (F + D + 1)     and keys and values of both streams, in layers below too
    delta rule      N H X + (R - 1) N (2 H + X)
    LaCT            3 N H F                 weights; as much again for momentum, and for raw weights
                    L N (2 H + 4)           k, v, rates, momentum of the open chunk
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ttcd_jax.errors import UserError
from ttcd_jax.inference.model import InferenceModel, abstract_model
from ttcd_jax.memory.pieces import OpenChunk
from ttcd_jax.methods.in_place import InPlaceState
from ttcd_jax.methods.registry import Settings
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.nn.block import LayerState
from ttcd_jax.nn.windows import KVCache
from ttcd_jax.sharding import rules


class InferenceState(NamedTuple):
    """The state of all rows: a pytree whose arrays have the batch axis first."""

    position: Int[Array, " B"]  # tokens read so far
    chunk_start: Int[Array, " B"]  # of the first chunk; 0 except with memory="published"
    layers: tuple[dict[str, LayerState], ...]  # a block's sub-layers by name


def start_state(
    model: InferenceModel, batch_size: int, *, max_length: int | None = None
) -> InferenceState:
    """The initial state of `batch_size` rows, sharded over the mesh in use by `state_axes`.
    `max_length`: the most tokens of a row, needed by full attention. Raises `UserError` without it,
    for a model that reads tokens ahead, a batch that does not divide among the devices, and a mesh
    with seq > 1."""
    if batch_size < 1:
        raise UserError(f"batch_size {batch_size} must be at least 1")
    if rules.axis_size("seq") > 1:
        raise UserError(
            f"a state holds whole rows: MeshConfig.seq {rules.axis_size('seq')} must be 1 to read "
            "prompts and generate"
        )
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        state = abstract_state(model, batch_size, max_length=max_length)
        rules.shardings(mesh, state_axes(state), state)  # raises where something does not divide
    return _start(model, batch_size=batch_size, max_length=max_length)


def abstract_state(
    model: InferenceModel, batch_size: int, *, max_length: int | None = None
) -> InferenceState:
    """Shapes and dtypes of `start_state`; nothing is allocated."""
    return _start.eval_shape(model, batch_size=batch_size, max_length=max_length)


@functools.partial(jax.jit, static_argnames=("batch_size", "max_length"))
def _start(model: InferenceModel, *, batch_size: int, max_length: int | None) -> InferenceState:
    layers = tuple(block.start(batch_size, max_length) for block in model.modules)
    position, chunk_start = (jnp.zeros(batch_size, jnp.int32) for _ in range(2))
    state = InferenceState(position, chunk_start, layers)
    return jax.tree.map(lambda x, names: rules.constrain(x, *names), state, state_axes(state))


def cache_slots(state: InferenceState) -> int | None:
    """Positions that the rings hold; None without attention."""
    caches = jax.tree.leaves(state.layers, is_leaf=lambda x: isinstance(x, KVCache))
    return next((x.keys.shape[1] for x in caches if isinstance(x, KVCache)), None)


def fresh_memories(model: InferenceModel, state: InferenceState) -> InferenceState:
    fresh = _start(model, batch_size=len(state.position), max_length=1)
    blocks = zip(block_configs(model.config), state.layers, fresh.layers, strict=True)
    layers = tuple(
        {name: (new if layer.is_in_place else old)[name] for name, layer in block.sublayers.items()}
        for block, old, new in blocks
    )
    return state._replace(chunk_start=state.position, layers=layers)


def frozen(model: InferenceModel, state: InferenceState) -> tuple[InferenceModel, InferenceState]:
    """The model that reads what the in-place memories of `state` hold and writes nothing, and the
    state to go on with: of a memory of the stream the student alone, at the cost of its window.
    What is in an open chunk is written first. Raises `UserError` for another method."""
    config = (model.config.settings or Settings()).frozen(model.config)
    count = state.position - state.chunk_start

    def closed(layer: Any, x: Any) -> Any:
        if not isinstance(x, InPlaceState):
            return x
        return x._replace(chunks=OpenChunk(layer.written(x, count), x.chunks.open))

    return model.by(config), read_only(model, _by_layer(closed, model, state))


def read_only(model: InferenceModel, state: InferenceState) -> InferenceState:
    """The state without open chunks, and without what only a teacher needs."""
    return _by_layer(lambda layer, x: layer.frozen(x), model, state)


def _by_layer(
    change: Callable[[Any, LayerState], LayerState], model: InferenceModel, state: InferenceState
) -> InferenceState:
    layers = tuple(
        {name: change(getattr(block, name), x) for name, x in before.items()}
        for block, before in zip(model.modules, state.layers, strict=True)
    )
    return state._replace(layers=layers)


def is_frozen(state: InferenceState) -> bool:
    """Whether nothing is written to the in-place memories, of which there are some."""
    nodes = jax.tree.leaves(state.layers, is_leaf=lambda node: isinstance(node, OpenChunk))
    return any(isinstance(node, OpenChunk) and node.open is None for node in nodes)


def state_axes(state: InferenceState) -> InferenceState:
    """The logical axes (`sharding.rules`) of every array."""

    def axes(node: Any) -> Any:
        return node.axes() if hasattr(node, "axes") else ("batch", *(None,) * (node.ndim - 1))

    return jax.tree.map(axes, state, is_leaf=lambda node: hasattr(node, "axes"))


@functools.lru_cache
def reads_ahead(config: TransformerConfig) -> bool:
    """Whether a model of `config` has no state, as a token's results depend on later tokens."""
    try:
        _start.eval_shape(abstract_model(config), batch_size=1, max_length=1)
    except UserError:
        return True
    return False


@functools.lru_cache
def state_bytes(
    config: TransformerConfig, batch_size: int, max_length: int | None = None
) -> dict[str, int]:
    """Bytes of a state by kind, nothing allocated: `attention` (rings of keys and values), `memory`
    (sums, running weights and delta-rule states), `open chunk` (with the tokens that convolutions
    look back at), `total`. A layer's state assigns the kinds (`kinds`)."""
    state = abstract_state(abstract_model(config), batch_size, max_length=max_length)
    sizes = {"attention": 0, "memory": 0, "open chunk": 0}
    for node in jax.tree.leaves(state.layers, is_leaf=lambda node: hasattr(node, "kinds")):
        for kind, part in node.kinds().items():
            arrays = jax.tree.leaves(part)
            sizes[kind] += sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return sizes | {"total": sum(sizes.values())}
