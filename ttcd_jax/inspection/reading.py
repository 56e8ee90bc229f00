"""A model read layer after layer: the operands of its memories, and the loss of every token.

Attention sees whole rows; MLPs and memories see parts of about 1,024 tokens, whole chunks, each
going on from the state after the one before: arrays of the width F exist for a part at a time. A
program is compiled for every kind of block, not for every model: controls use the same ones.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from ttcd_jax.errors import UserError
from ttcd_jax.inference.decode import embedded, nats
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.memory.prefix import PrefixMemory, SumMemory
from ttcd_jax.memory.running import CorrectingMemory
from ttcd_jax.methods.in_place import Operands
from ttcd_jax.methods.ipttcd_stream import StreamMemoryConfig
from ttcd_jax.methods.registry import method_named
from ttcd_jax.models.config import has_in_place_memory, memory_chunk, switched_off
from ttcd_jax.nn.row import Control, Part, Row
from ttcd_jax.train import layers_on_disk as disk

PART = 1024  # tokens, or a longer chunk


def memories(model: InferenceModel) -> dict[int, SumMemory]:
    """The memories by their layers. Raises `UserError` for a model without, and for a memory of
    which no token can be said to have written what another one reads."""
    config, found = model.config, {}
    if not has_in_place_memory(config):
        raise UserError(
            f"method {config.method!r} has no in-place memory to look at: take a run of ipttcd, "
            "ipttt or ipttcd_stream, or give one of full attention a memory of its stream "
            "(ttcd_jax.inspection.with_stream_memory, --stream_window)"
        )
    layers = {layer: x.mlp for layer, x in enumerate(model.modules) if x.config.is_in_place}
    for layer, mlp in layers.items():
        found[layer] = memory = mlp.memory(mlp.settings.chunk_size)
        is_linear = isinstance(memory, PrefixMemory) and not memory.options.orthogonalizes
        if not (is_linear or isinstance(memory, CorrectingMemory)) or mlp.settings.is_frozen:
            raise UserError(
                f"method {config.method!r} with a {type(memory).__name__} of these settings: what "
                "a token reads there is no sum of errors that others stored under keys; inspect "
                "looks at sums and at the delta rule"
            )
    return found


def without(model: InferenceModel, layers: Collection[int], length: int) -> InferenceModel:
    """The model whose memories in `layers` are not read in rows of `length` tokens."""
    off = switched_off(model.config, length)
    assert off is not None, "an in-place memory has a rate"
    pairs = enumerate(zip(model.blocks, model.by(off).blocks, strict=True))
    blocks = tuple(other if i in layers else own for i, (own, other) in pairs)
    return dataclasses.replace(model, blocks=blocks)


def read_row(
    model: InferenceModel,
    tokens: Int[np.ndarray, "B T"],
    segments: Int[np.ndarray, " T"] | None = None,
    *,
    control: Control | None = None,
    layers: Collection[int] = (),
) -> tuple[np.ndarray, dict[int, list[Operands]]]:
    """(nats of the tokens of the first row [T], NaN where a document begins; the operands of its
    memories in `layers`, numpy by part). `segments` are those of every row."""
    chunk = memory_chunk(model.config)
    assert chunk is not None
    size, length = chunk * max(1, PART // chunk), tokens.shape[1]
    parts = [np.s_[:, i : i + size] for i in range(0, length, size)]
    start = embedded(model, jnp.asarray(tokens))
    ids = None if segments is None else jnp.tile(segments, (len(tokens), 1))
    row = Row.of(start, None, ids, start)
    cuts = [jax.tree.map(lambda x, cut=cut: x[cut], row) for cut in parts]
    streams, found = (start, None), {}
    for layer, block in enumerate(model.modules):
        streams, _ = _step(block, "mixer", None, streams, row)
        part, after = Part(), []
        for cut, own in zip(parts, cuts, strict=True):
            before = jax.tree.map(lambda x, cut=cut: x[cut], streams)
            own = own._replace(part=part if block.config.is_in_place else None)
            part_streams, report = _step(block, "mlp", control, before, own)
            after.append(part_streams)
            if isinstance(report, Operands):
                last = None if own.segment_ids is None else own.segment_ids[:, -1]
                part = Part(report.state, last)
                if layer in layers:
                    kept = jax.tree.map(lambda x: x[:1], report._replace(state=None))
                    found.setdefault(layer, []).append(jax.device_get(kept))
        streams = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *after)
    targets = jnp.asarray(np.roll(tokens[:1], -1, axis=1))
    losses = [np.asarray(nats(model, streams[0][:1][cut], targets[cut])[0]) for cut in parts]
    begins = np.arange(length) == 0
    if segments is not None:
        begins[1:] = segments[1:] != segments[:-1]
    return np.where(begins, np.nan, np.roll(np.concatenate(losses).astype(float), 1)), found


@functools.partial(nnx.jit, static_argnums=(1, 2))
def _step(block: Any, name: str, control: Control | None, streams: Any, row: Row) -> Any:
    return block.step(name, streams, row._replace(control=control))


def with_stream_memory(
    run: Any, *, window: int = 128, layer: int | None = None, rate: float = 0.3, sinks: int = 4
) -> Any:
    """The run (a `LoadedRun`), whose model reads under `window`, with `sinks` first tokens beside
    it (a windowed model keeps its own), and has a memory of what its stream lacks beside the model
    as it is: after `layer` (None: at four fifths of the layers), of this constant rate, as task
    stream measures. Parameters are shared. Raises `UserError` for a model with a memory, and a
    window that is not smaller."""
    config, params = run.config, nnx.to_pure_dict(nnx.state(run.model, nnx.Param))
    if method_named(config.method).layers != "none":
        raise UserError(f"method {config.method!r} has its own memory: inspect the run as it is")
    if config.window is not None and window >= config.window:
        raise UserError(f"window {window} is not below the model's, {config.window}")
    new = config.replace(
        method="ipttcd_stream",
        memory=StreamMemoryConfig(initial_rate=rate, chunk_size=64),
        fast_layers=(config.num_layers * 4 // 5 if layer is None else layer,),
        student_window=window,
        # Both windows have them: those of a windowed model stay, for it is the teacher.
        sink_tokens=sinks if config.window is None else config.sink_tokens,
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), disk.stored_params(new))
    rows = disk.unstacked(config, disk.by_name(params))
    return run._replace(model=disk.model_of(new, zeros | rows), config=new)
