"""The reference implementation's parameter names and layouts against ours.

Its linear weights are [out, in], ours [in, out]; its depthwise convolutions [F, 1, R], ours [R, F];
`ttt_proj` multiplies from the right in both (e P) and is not transposed.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from ttcd_jax.methods.delta_net import DeltaNetConfig
from ttcd_jax.methods.gated_delta_net import GatedDeltaNetConfig
from ttcd_jax.methods.lact import LaCTConfig
from ttcd_jax.models.block import BlockConfig, HybridBlockConfig
from ttcd_jax.models.catalog import TransformerConfig, block_configs
from ttcd_jax.models.transformer import place_of_layer
from ttcd_jax.train.state import abstract_model

Layout = Literal["same", "linear", "conv"]
Names = Mapping[str, tuple[str, Layout]]
Params = dict[str, Any]  # nested, arrays at the leaves

MLP_NAMES: Names = {
    "gate_proj.weight": ("gate", "linear"),
    "up_proj.weight": ("up", "linear"),
    "down_proj.weight": ("down", "linear"),
    "ttt_proj.weight": ("proj", "same"),
    "ttt_teacher_conv.weight": ("teacher_conv", "conv"),
    "ttt_student_conv.weight": ("student_conv", "conv"),
    "b_proj": ("rate", "same"),
    "ttt_conv.weight": ("target_conv", "conv"),
    "ttt_activation_conv.weight": ("activation_conv", "conv"),
}
_PROJECTIONS: Names = {
    "q_proj.weight": ("query", "linear"),
    "k_proj.weight": ("key", "linear"),
    "v_proj.weight": ("value", "linear"),
    "o_proj.weight": ("out", "linear"),
}
ATTENTION_NAMES: Names = {
    **_PROJECTIONS,
    "q_proj.bias": ("query_bias", "same"),
    "k_proj.bias": ("key_bias", "same"),
    "v_proj.bias": ("value_bias", "same"),
    "q_norm.weight": ("query_norm", "same"),
    "k_norm.weight": ("key_norm", "same"),
}
DELTA_NAMES: Names = {
    **_PROJECTIONS,
    "b_proj.weight": ("rate", "linear"),
    "q_conv1d.weight": ("query_conv", "conv"),
    "k_conv1d.weight": ("key_conv", "conv"),
    "v_conv1d.weight": ("value_conv", "conv"),
    "o_norm.weight": ("head_norm", "same"),
    "a_proj.weight": ("decay", "linear"),
    "A_log": ("decay_log", "same"),
    "dt_bias": ("decay_bias", "same"),
    "g_proj.weight": ("gate", "linear"),
}
LACT_NAMES: Names = {
    "qkv.weight": ("qkv", "linear"),
    "qkv.bias": ("qkv_bias", "same"),
    "o_proj.weight": ("out", "linear"),
    "q_norm.weight": ("query_norm", "same"),
    "k_norm.weight": ("key_norm", "same"),
    "qk_scale": ("qk_scale", "same"),
    "qk_offset": ("qk_offset", "same"),
    "w0": ("w0", "linear"),
    "w1": ("w1", "linear"),
    "w2": ("w2", "linear"),
    "w0.w_left": ("w0_left", "linear"),
    "w0.w_right": ("w0_right", "linear"),
    "w2.w_left": ("w2_left", "linear"),
    "w2.w_right": ("w2_right", "linear"),
    "lr_proj.weight": ("rate", "linear"),
    "lr_proj.bias": ("rate_bias", "same"),
    "ttt_scale_proj.weight": ("scale", "linear"),
    "ttt_scale_proj.bias": ("scale_bias", "same"),
    "ttt_norm.weight": ("fast_norm", "same"),
    "momentum_proj.0.weight": ("momentum", "linear"),
    "momentum_proj.0.bias": ("momentum_bias", "same"),
}


def _below(prefix: str, attribute: str, names: Names) -> dict[str, tuple[str, Layout]]:
    return {prefix + name: (f"{attribute}/{ours}", kind) for name, (ours, kind) in names.items()}


def block_names(config: BlockConfig) -> Names:
    """The names of one block, which are those of its mixer, its MLP and its norms."""
    mixers = {DeltaNetConfig: DELTA_NAMES, GatedDeltaNetConfig: DELTA_NAMES, LaCTConfig: LACT_NAMES}
    mixer = mixers.get(type(config.mixer), ATTENTION_NAMES)
    names: dict[str, tuple[str, Layout]] = {
        "attn_norm.weight": ("mixer_norm", "same"),
        "mlp_norm.weight": ("mlp_norm", "same"),
        **_below("attn.", "mixer", mixer),
        **_below("mlp.", "mlp", MLP_NAMES),
    }
    if isinstance(config, HybridBlockConfig):
        names["dn_norm.weight"] = ("delta_norm", "same")
        names |= _below("dn_", "delta", DELTA_NAMES)
    return names


MODEL_NAMES: Names = {
    "model.embeddings.weight": ("embedding", "same"),
    "model.norm.weight": ("final_norm", "same"),
    "lm_head.weight": ("head", "same"),
}
_LAYER_PREFIX = "model.layers."


def _to_ours(value: np.ndarray, layout: Layout) -> np.ndarray:
    return {"same": lambda x: x, "linear": lambda x: x.mT, "conv": lambda x: x[:, 0].T}[layout](
        value
    )


def _to_reference(value: np.ndarray, layout: Layout) -> np.ndarray:
    return {"same": lambda x: x, "linear": lambda x: x.mT, "conv": lambda x: x.T[:, None]}[layout](
        value
    )


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
        path, layout = block_names(blocks[layer])[rest]
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

    def shape(value: jax.ShapeDtypeStruct, layout: Layout) -> tuple[int, ...]:
        return jax.eval_shape(lambda x: _to_reference(x, layout), value).shape

    return {name: shape(value, layout) for name, value, layout in _named(params, config)}


def _layer_of(name: str) -> tuple[int, str]:
    layer, _, rest = name.removeprefix(_LAYER_PREFIX).partition(".")
    return int(layer), rest


def _named(params: Params, config: TransformerConfig) -> Iterator[tuple[str, Any, Layout]]:
    """(reference name, our array, layout) of every parameter."""
    for name, (path, layout) in MODEL_NAMES.items():
        if path in params:
            yield name, params[path], layout
    for layer, block in enumerate(block_configs(config)):
        place = place_of_layer(config, layer)
        own = params[place.group][place.block]
        for name, (path, layout) in block_names(block).items():
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
