"""The reference implementation's parameter names and layouts against ours.

Its linear weights are [out, in], ours [in, out]; its depthwise convolutions [F, 1, R], ours [R, F];
`ttt_proj` multiplies from the right in both (e P) and is not transposed. Every layer knows its own
names (`SublayerConfig.reference_names`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.models.transformer import place_of_layer
from ttcd_jax.nn.block import Names
from ttcd_jax.train.state import abstract_model

Params = dict[str, Any]  # nested, arrays at the leaves

MODEL_NAMES: Names = {
    "model.embeddings.weight": ("embedding", "same"),
    "model.norm.weight": ("final_norm", "same"),
    "lm_head.weight": ("head", "same"),
}
_LAYER_PREFIX = "model.layers."


def _to_ours(value: np.ndarray, layout: str) -> np.ndarray:
    convert = {"same": lambda x: x, "linear": lambda x: x.mT, "conv": lambda x: x[:, 0].T}
    return convert[layout](value)


def _to_reference(value: np.ndarray, layout: str) -> np.ndarray:
    convert = {"same": lambda x: x, "linear": lambda x: x.mT, "conv": lambda x: x.T[:, None]}
    return convert[layout](value)


def _put(tree: Params, path: str, value: Any) -> None:
    *parents, leaf = path.split("/")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[leaf] = value


def _get(tree: Params, path: str) -> Any:
    value: Any = tree
    for name in path.split("/"):
        value = value[name]
    return value


def module_from_reference(tensors: Mapping[str, np.ndarray], names: Names) -> Params:
    """Our parameters of one MLP or block. Raises `KeyError` for a name the table lacks."""
    tree: Params = {}
    for name, value in tensors.items():
        path, layout = names[name]
        _put(tree, path, _to_ours(value, layout))
    return tree


def module_to_reference(params: Params, names: Names) -> dict[str, np.ndarray]:
    """The inverse: every parameter under its reference name. Linear, so it maps gradients too."""
    return {
        name: _to_reference(np.asarray(_get(params, path)), layout)
        for name, (path, layout) in names.items()
        if _has(params, path)
    }


def model_from_reference(tensors: Mapping[str, np.ndarray], config: TransformerConfig) -> Params:
    """Our stacked parameters of a whole model. Raises `KeyError` for a name the tables lack and
    for a layer that has no tensor of a name its equals have."""
    tree: Params = {}
    rows: dict[str, dict[int, np.ndarray]] = {}
    blocks = block_configs(config)
    places = [place_of_layer(config, layer) for layer in range(config.num_layers)]
    for name, value in tensors.items():
        if not name.startswith(_LAYER_PREFIX):
            path, layout = MODEL_NAMES[name]
            _put(tree, path, _to_ours(value, layout))
            continue
        layer, rest = _layer_of(name)
        place = places[layer]
        path, layout = blocks[layer].reference_names[rest]
        stack = rows.setdefault(f"{place.group}/{place.block}/{path}", {})
        stack[place.row] = _to_ours(value, layout)
    for path, stack in rows.items():
        _put(tree, path, np.stack([stack[row] for row in range(len(stack))]))
    return tree


def model_to_reference(params: Params, config: TransformerConfig) -> dict[str, np.ndarray]:
    """The inverse of `model_from_reference`: every parameter under its reference name. Linear, so
    it maps gradients too."""
    return {
        name: _to_reference(np.asarray(value), layout)
        for name, value, layout in _named(params, config)
    }


def reference_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the reference has for this model; nothing is allocated."""
    params = nnx.to_pure_dict(nnx.state(abstract_model(config), nnx.Param))

    def shape(value: jax.ShapeDtypeStruct, layout: str) -> tuple[int, ...]:
        return jax.eval_shape(lambda x: _to_reference(x, layout), value).shape

    return {name: shape(value, layout) for name, value, layout in _named(params, config)}


def _layer_of(name: str) -> tuple[int, str]:
    layer, _, rest = name.removeprefix(_LAYER_PREFIX).partition(".")
    return int(layer), rest


def _named(params: Params, config: TransformerConfig) -> Iterator[tuple[str, Any, str]]:
    """(reference name, our array, layout) of every parameter."""
    for name, (path, layout) in MODEL_NAMES.items():
        if path in params:
            yield name, params[path], layout
    for layer, block in enumerate(block_configs(config)):
        place = place_of_layer(config, layer)
        own = params[place.group][place.block]
        for name, (path, layout) in block.reference_names.items():
            if _has(own, path):
                value = _row(_get(own, path), place.row)
                yield f"{_LAYER_PREFIX}{layer}.{name}", value, layout


def _row(stacked: Any, row: int) -> Any:
    if isinstance(stacked, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
    return stacked[row]


def _has(tree: Params, path: str) -> bool:
    *parents, leaf = path.split("/")
    for name in parents:
        tree = tree.get(name, {})
    return leaf in tree
