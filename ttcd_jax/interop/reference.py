"""The reference implementation's parameter names, layouts and configuration keys against ours.

Its linear weights are [out, in], ours [in, out]; its depthwise convolutions [F, 1, R], ours [R, F];
`ttt_proj` multiplies from the right in both (e P) and is not transposed.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from ttcd_jax.layers.ipttcd import MemoryConfig
from ttcd_jax.layers.rope import RopeConfig
from ttcd_jax.models.catalog import TransformerConfig
from ttcd_jax.models.transformer import place_of_layer

Layout = Literal["same", "linear", "conv"]
Params = dict[str, Any]  # nested, arrays at the leaves

MLP_NAMES: dict[str, tuple[str, Layout]] = {
    "gate_proj.weight": ("gate", "linear"),
    "up_proj.weight": ("up", "linear"),
    "down_proj.weight": ("down", "linear"),
    "ttt_proj.weight": ("proj", "same"),
    "ttt_teacher_conv.weight": ("teacher_conv", "conv"),
    "ttt_student_conv.weight": ("student_conv", "conv"),
    "b_proj": ("rate", "same"),
}
BLOCK_NAMES: dict[str, tuple[str, Layout]] = {
    "attn_norm.weight": ("mixer_norm", "same"),
    "attn.q_proj.weight": ("attention/query", "linear"),
    "attn.k_proj.weight": ("attention/key", "linear"),
    "attn.v_proj.weight": ("attention/value", "linear"),
    "attn.o_proj.weight": ("attention/out", "linear"),
    "attn.q_norm.weight": ("attention/query_norm", "same"),
    "attn.k_norm.weight": ("attention/key_norm", "same"),
    "mlp_norm.weight": ("mlp_norm", "same"),
    **{f"mlp.{name}": (f"mlp/{ours}", layout) for name, (ours, layout) in MLP_NAMES.items()},
}
MODEL_NAMES: dict[str, tuple[str, Layout]] = {
    "model.embeddings.weight": ("embedding", "same"),
    "model.norm.weight": ("final_norm", "same"),
    "lm_head.weight": ("head", "same"),
}
_LAYER_PREFIX = "model.layers."


def _to_ours(value: np.ndarray, layout: Layout) -> np.ndarray:
    return {"same": lambda x: x, "linear": lambda x: x.T, "conv": lambda x: x[:, 0].T}[layout](
        value
    )


def _to_reference(value: np.ndarray, layout: Layout) -> np.ndarray:
    return {"same": lambda x: x, "linear": lambda x: x.T, "conv": lambda x: x.T[:, None]}[layout](
        value
    )


def _put(tree: Params, path: str, value) -> None:
    *parents, leaf = path.split("/")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[leaf] = value


def _get(tree: Params, path: str) -> Any:
    value: Any = tree
    for name in path.split("/"):
        value = value[name]
    return value


def module_from_reference(
    tensors: Mapping[str, np.ndarray], names: Mapping[str, tuple[str, Layout]]
) -> Params:
    """Our parameters of one MLP or block. Raises `KeyError` for a name the table lacks."""
    tree: Params = {}
    for name, value in tensors.items():
        path, layout = names[name]
        _put(tree, path, _to_ours(value, layout))
    return tree


def module_to_reference(
    params: Params, names: Mapping[str, tuple[str, Layout]], wanted: list[str]
) -> dict[str, np.ndarray]:
    """The inverse, for the names `wanted`. Linear, so it maps gradients too."""
    return {
        name: _to_reference(np.asarray(_get(params, path)), layout)
        for name, (path, layout) in names.items()
        if name in wanted
    }


def model_from_reference(tensors: Mapping[str, np.ndarray], config: TransformerConfig) -> Params:
    """Our stacked parameters of a whole model. Raises `KeyError` for a name the tables lack."""
    tree: Params = {}
    rows: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        if not name.startswith(_LAYER_PREFIX):
            path, layout = MODEL_NAMES[name]
            _put(tree, path, _to_ours(value, layout))
            continue
        layer, _, rest = name.removeprefix(_LAYER_PREFIX).partition(".")
        place = place_of_layer(config, int(layer))
        path, layout = BLOCK_NAMES[rest]
        stack = rows.setdefault(f"{place.group}/{place.block}/{path}", {})
        stack[place.row] = _to_ours(value, layout)
    for path, stack in rows.items():
        _put(tree, path, np.stack([stack[row] for row in range(len(stack))]))
    return tree


def model_to_reference(
    params: Params, config: TransformerConfig, wanted: list[str]
) -> dict[str, np.ndarray]:
    """The inverse of `model_from_reference`, for the names `wanted`."""
    tensors = {}
    for name in wanted:
        if not name.startswith(_LAYER_PREFIX):
            path, layout = MODEL_NAMES[name]
            tensors[name] = _to_reference(np.asarray(_get(params, path)), layout)
            continue
        layer, _, rest = name.removeprefix(_LAYER_PREFIX).partition(".")
        place = place_of_layer(config, int(layer))
        path, layout = BLOCK_NAMES[rest]
        stacked = _get(params, f"{place.group}/{place.block}/{path}")
        tensors[name] = _to_reference(np.asarray(stacked[place.row]), layout)
    return tensors


def memory_config(source: Mapping[str, Any], **changes: Any) -> MemoryConfig:
    """A `MemoryConfig` from the reference's flags. `changes` are fields it has no flag for."""
    if source["ttt_output_source"] == "student":
        output = "student"
    else:
        is_raw = source["ttt_teacher_conv"] and not source["ttt_output_use_teacher_conv"]
        output = "teacher_raw" if is_raw else "teacher"
    return MemoryConfig(
        chunk_size=source["ttt_chunk"],
        eta=float(source["ttt_lr"]),
        num_taps=source["ttt_conv_kernel_size"],
        is_conv_causal=source["ttt_conv_causal"],
        has_teacher_conv=source["ttt_teacher_conv"],
        has_student_conv=source["ttt_student_conv"],
        has_proj=source["ttt_proj"],
        has_token_rate=source["dynamic_lr"],
        normalizes_keys=source["ttt_normalize_student_features"],
        normalizes_errors=source["ttt_norm_proj_diff"],
        output=output,
        renorm_chunks=source["ttt_update_every"] if source["ttt_weight_renorm"] else None,
        orthogonalizes_updates=source["use_muon"],
        **changes,
    )


def transformer_config(source: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """A `TransformerConfig` from the reference's model configuration. Its q/k norm uses eps 1e-5
    always."""
    fields: dict[str, Any] = {
        "vocab_size": source["vocab_size"],
        "dim": source["hidden_size"],
        "num_layers": source["num_hidden_layers"],
        "num_heads": source["num_heads"],
        "mlp_dim": source["intermediate_size"],
        "num_kv_heads": source["num_kv_heads"],
        "head_dim": source["head_dim"],
        "window": source["window_size"],
        "rope": RopeConfig(base=float(source["rope_theta"])),
        "has_qk_norm": source["qk_norm"],
        "qk_norm_eps": 1e-5,
        "norm_eps": source["norm_eps"],
        "has_tied_head": source["tie_word_embeddings"],
    }
    if source["ttt_mode"]:
        fields |= {
            "method": "ipttcd",
            "fast_layers": tuple(source["ttt_layers"]),
            "student_window": source["ttt_chunk"] * source["ttt_visible_chunks"],
            "memory": memory_config(source),
        }
    else:
        fields["method"] = "full" if source["window_size"] is None else "swa"
    return TransformerConfig(**(fields | changes))
