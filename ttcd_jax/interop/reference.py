"""Conversion between the parameter names and layouts of the reference implementation and ours.

Its linear weights are [out, in], ours [in, out]; its depthwise convolutions [F, 1, R], ours [R, F];
`ttt_proj` multiplies from the right in both (e P) and is not transposed. Every layer has its own
names (`SublayerConfig.reference_names`).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.models.transformer import slot_of_layer
from ttcd_jax.nn.block import Names
from ttcd_jax.train.state import abstract_model

Params = dict[str, Any]  # nested, arrays at the leaves

MODEL_NAMES: Names = {
    "model.embeddings.weight": ("embedding", "same"),
    "model.norm.weight": ("final_norm", "same"),
    "lm_head.weight": ("head", "same"),
}
_LAYER_PREFIX = "model.layers."


class Layout(NamedTuple):
    """The two directions of a tensor's conversion."""

    to_ours: Callable[[Any], Any]
    to_theirs: Callable[[Any], Any]


LAYOUTS = {
    "same": Layout(lambda x: x, lambda x: x),
    "linear": Layout(lambda x: x.mT, lambda x: x.mT),
    "conv": Layout(lambda x: x[:, 0].T, lambda x: x.T[:, None]),
}


def module_from_reference(tensors: Mapping[str, np.ndarray], names: Names) -> Params:
    """Our parameters of one MLP or block. Raises `KeyError` for an unknown name."""
    items = [(*names[name], value) for name, value in tensors.items()]
    return unflatten_dict(
        {path: LAYOUTS[kind].to_ours(value) for path, kind, value in items}, sep="/"
    )


def module_to_reference(params: Params, names: Names) -> dict[str, np.ndarray]:
    """The inverse of `module_from_reference`. Linear, so it maps gradients too."""
    flat = flatten_dict(params, sep="/")
    return {
        name: LAYOUTS[layout].to_theirs(np.asarray(flat[path]))
        for name, (path, layout) in names.items()
        if path in flat
    }


def model_from_reference(tensors: Mapping[str, np.ndarray], config: TransformerConfig) -> Params:
    """Our stacked parameters of a whole model. Raises `KeyError` for an unknown name and for a
    layer that lacks a tensor of its stack."""
    flat: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    blocks = block_configs(config)
    slots = [slot_of_layer(config, layer) for layer in range(config.num_layers)]
    for name, value in tensors.items():
        if not name.startswith(_LAYER_PREFIX):
            path, layout = MODEL_NAMES[name]
            flat[path] = LAYOUTS[layout].to_ours(value)
            continue
        layer, _, own_name = name.removeprefix(_LAYER_PREFIX).partition(".")
        slot = slots[int(layer)]
        path, layout = blocks[int(layer)].reference_names[own_name]
        stack = stacks.setdefault(f"{slot.group}/{slot.block}/{path}", {})
        stack[slot.row] = LAYOUTS[layout].to_ours(value)
    for path, stack in stacks.items():
        flat[path] = np.stack([stack[row] for row in range(len(stack))])
    return unflatten_dict(flat, sep="/")


def model_to_reference(params: Params, config: TransformerConfig) -> dict[str, np.ndarray]:
    """The inverse of `model_from_reference`: every parameter under its reference name. Linear, so
    it maps gradients too."""
    named = _named(params, config)
    return {name: LAYOUTS[layout].to_theirs(np.asarray(value)) for name, value, layout in named}


def reference_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the reference has for this model; nothing is allocated."""

    def tensors(params: Params) -> dict[str, jax.Array]:
        return {name: LAYOUTS[layout].to_theirs(x) for name, x, layout in _named(params, config)}

    params = nnx.to_pure_dict(nnx.state(abstract_model(config), nnx.Param))
    return {name: x.shape for name, x in jax.eval_shape(tensors, params).items()}


def names_on_disk(config: TransformerConfig) -> dict[str, tuple[str, Layout]]:
    """Reference name -> (name in our checkpoints, layout) of every parameter that a layer of the
    model can have."""
    names = {name: (path, LAYOUTS[layout]) for name, (path, layout) in MODEL_NAMES.items()}
    for layer, block in enumerate(block_configs(config)):
        for name, (path, layout) in block.reference_names.items():
            stored = f"layers/{layer}/{path}", LAYOUTS[layout]
            names[f"{_LAYER_PREFIX}{layer}.{name}"] = stored
    return names


def _named(params: Params, config: TransformerConfig) -> Iterator[tuple[str, Any, str]]:
    """(reference name, our array, layout) of every parameter."""
    for name, (path, layout) in MODEL_NAMES.items():
        if path in params:
            yield name, params[path], layout
    for layer, block in enumerate(block_configs(config)):
        slot = slot_of_layer(config, layer)
        leaves: dict[str, Any] = flatten_dict(params[slot.group][slot.block], sep="/")
        for name, (path, layout) in block.reference_names.items():
            if path in leaves:
                yield f"{_LAYER_PREFIX}{layer}.{name}", leaves[path][slot.row], layout
