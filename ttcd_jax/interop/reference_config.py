"""The reference implementation's configuration keys against ours, as tables, in both directions.

Its `config.json` leaves defaults out, and they differ between its model classes: a key that is
absent takes the default written here. What its code computes and ours cannot is refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.models.catalog import TransformerConfig

_REQUIRED = object()


class Key(NamedTuple):
    """One key of `config.json`, the field of `TransformerConfig` it sets, its default when
    absent, and, for a word, our word for it."""

    name: str
    field: str
    default: Any = _REQUIRED
    words: Mapping[str, str] | None = None


_CONV_INIT = {"zero": "zeros", "identity": "identity", "random": "normal"}
_PROJ_INIT = {
    "diagonal": "identity",
    "diagonal_gaussian": "gaussian_diagonal",
    "zero": "zeros",
    "random": "normal",
}
_TARGETS: Mapping[str, str] = {
    **dict.fromkeys(("hidden", "hidden_state", "hidden_states"), "hidden"),
    **dict.fromkeys(("embedding", "embed", "input_embed", "input_embeds"), "embedding"),
}

_COMMON = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "dim"),
    Key("num_hidden_layers", "num_layers"),
    Key("norm_eps", "norm_eps", 1e-6),
    Key("tie_word_embeddings", "has_tied_head", False),
    Key("initializer_range", "init_std", 0.02),
)
_ATTENTION = (
    Key("num_heads", "num_heads"),
    Key("num_kv_heads", "num_kv_heads", None),
    Key("head_dim", "head_dim", None),
    Key("window_size", "window", None),
    Key("rope_theta", "rope.base", 10000.0),
    Key("qk_norm", "has_qk_norm", False),
    Key("qkv_bias", "has_qkv_bias", False),
)
_FAST = (Key("ttt_layers", "fast_layers"),)
_IPTTCD = (
    Key("ttt_chunk", "memory.chunk_size", 8192),
    Key("ttt_lr", "memory.eta", 0.3),
    Key("ttt_proj", "memory.has_proj", True),
    Key("ttt_proj_init", "memory.proj_init", "diagonal", _PROJ_INIT),
    Key("ttt_teacher_conv", "memory.has_teacher_conv", True),
    Key("ttt_student_conv", "memory.has_student_conv", True),
    Key("ttt_conv_kernel_size", "memory.num_taps", 5),
    Key("ttt_conv_causal", "memory.is_conv_causal", True),
    Key("ttt_teacher_conv_init", "memory.teacher_conv_init", "zero", _CONV_INIT),
    Key("ttt_student_conv_init", "memory.student_conv_init", "zero", _CONV_INIT),
    Key("dynamic_lr", "memory.has_token_rate", True),
    Key("ttt_normalize_student_features", "memory.normalizes_keys", True),
    Key("ttt_norm_proj_diff", "memory.normalizes_errors", False),
    Key("use_muon", "memory.orthogonalizes_updates", False),
)
_IPTTT = (
    Key("ttt_chunk", "target_memory.chunk_size", 8192),
    Key("ttt_lr", "target_memory.eta", 0.3),
    Key("ttt_target", "target_memory.target", "hidden", _TARGETS),
    Key("ttt_proj", "target_memory.has_proj", True),
    # Both of its diagonal starts are random here.
    Key(
        "ttt_proj_init",
        "target_memory.proj_init",
        "diagonal_gaussian",
        _PROJ_INIT | {"diagonal": "gaussian_diagonal"},
    ),
    Key("ttt_conv", "target_memory.has_target_conv", True),
    Key("ttt_activation_conv", "target_memory.has_activation_conv", False),
    Key("ttt_conv_kernel_size", "target_memory.num_taps", 5),
    Key("ttt_conv_causal", "target_memory.is_conv_causal", False),
)
_DELTA = (Key("num_heads", "num_heads"), Key("conv_size", "delta.num_taps", 4))
_LACT = (
    Key("num_attn_heads", "num_heads"),
    Key("window_size", "window", None),
    Key("rope_theta", "rope.base", 10000.0),
    Key("num_lact_heads", "lact.num_fast_heads"),
    Key("inter_multi", "lact.hidden_expansion", 1),
    Key("lact_chunk_size", "lact.chunk_size", 2048),
    Key("use_momentum", "lact.has_momentum", False),
    Key("use_muon", "lact.orthogonalizes_updates", False),
    Key("ttt_prenorm", "lact.keeps_raw_state", False),
    Key("qkv_silu", "lact.has_qk_silu", True),
    Key("learnable_ttt_scale", "lact.has_scale", False),
    Key("attn_qk_norm", "lact.has_qk_norm", False),
    Key("qkv_bias", "lact.has_qkv_bias", False),
)


class Family(NamedTuple):
    """One model class of the reference: its `model_type`, our method, its keys, and flags it has
    whose other values we do not compute."""

    model_type: str
    method: str
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any]


_ATTENTION_FIXED = {"use_output_gate": False, "attn": None}
_DELTA_FIXED = {
    "use_short_conv": True,
    "conv_bias": False,
    "attn": None,
    "allow_neg_eigval": False,
    "num_v_heads": None,
}
_IPTTCD_FAMILY = Family(
    "ipttcdv9", "ipttcd", (*_COMMON, *_ATTENTION, *_FAST, *_IPTTCD), _ATTENTION_FIXED
)
FAMILIES: dict[str, Family] = {
    "transformer": Family(
        "transformer", "swa", (*_COMMON, *_ATTENTION), _ATTENTION_FIXED | {"rope_scaling": None}
    ),
    "ipttcdv9": _IPTTCD_FAMILY,
    "ipttcdv9_lowcopy": _IPTTCD_FAMILY,
    "ipttcdv8": _IPTTCD_FAMILY,
    "ipttcd": _IPTTCD_FAMILY,
    "ipttt": Family("ipttt", "ipttt", (*_COMMON, *_ATTENTION, *_FAST, *_IPTTT), _ATTENTION_FIXED),
    "delta_net": Family(
        "delta_net",
        "deltanet",
        (*_COMMON, *_DELTA),
        _DELTA_FIXED
        | {
            "use_gate": False,
            "use_beta": True,
            "use_output_norm": True,
            "qk_norm": "l2",
            "qk_activation": "silu",
        },
    ),
    "gated_deltanet": Family(
        "gated_deltanet",
        "gated_deltanet",
        (*_COMMON, *_DELTA, Key("head_dim", "head_dim", 256)),
        _DELTA_FIXED | {"use_gate": True},
    ),
    "deltanet_baseline": Family(
        "deltanet_baseline", "deltanet_hybrid", (*_COMMON, *_ATTENTION, *_FAST), _ATTENTION_FIXED
    ),
    "lact": Family(
        "lact", "lact", (*_COMMON, *_LACT), {"lr_dim": 1, "lr_parameterization": "mamba"}
    ),
}
# What carries no number of the forward pass or is read outside the tables.
_SILENT = {
    "_comment", "architectures", "attention_bias", "auto_map", "bos_token_id", "conv_bias",
    "dtype", "elementwise_affine", "eos_token_id", "expand_k", "expand_v", "fuse_cross_entropy",
    "fuse_linear_cross_entropy", "fuse_norm", "fuse_swiglu", "fw_init_gain", "hidden_act",
    "hidden_ratio", "intermediate_size", "max_position_embeddings", "mode", "model_type",
    "no_v_silu", "pad_token_id", "qk_activation", "qk_norm", "rope_scaling", "torch_dtype",
    "transformers_version", "ttt_force_grouped_scan", "ttt_mode", "ttt_nope", "ttt_norm_log_freq",
    "ttt_normalize_diff_inputs", "ttt_output_source", "ttt_output_use_teacher_conv",
    "ttt_proj_diff_use_wcur", "ttt_scan_group_size", "ttt_scan_state_dtype", "ttt_update_every",
    "ttt_visible_chunks", "ttt_weight_renorm", "use_cache", "vocab_size", "w0_w2_low_rank",
}  # fmt: skip


def family_of(source: Mapping[str, Any]) -> Family:
    """The family that `model_type` names. Raises `DataError` for one that is unknown."""
    name = source.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise DataError(
            f"model_type {name!r} is none of the reference's: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    # A fast-weight class with its fast weights switched off is the plain transformer.
    if family.method in ("ipttcd", "ipttt") and not _flag(source, "ttt_mode", True):
        return FAMILIES["transformer"]
    return family


def unread_keys(source: Mapping[str, Any]) -> list[str]:
    """Keys of `config.json` that no table knows: worth a line to the user."""
    # Those of the class itself where its fast weights are off: known, though without effect.
    families = (family_of(source), FAMILIES[source["model_type"]])
    known = _SILENT.union(*({key.name for key in f.keys} | f.fixed.keys() for f in families))
    return sorted(set(source) - known)


def transformer_config(source: Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """Our configuration of the model that a `config.json` of the reference describes.

    Its q/k norm uses eps 1e-5 always. `changes` are fields it has no key for.

    Raises:
        DataError: an unknown `model_type`, a missing key, or a flag value we do not compute.
    """
    family = family_of(source)
    for name, value in family.fixed.items():
        if source.get(name, value) != value:
            raise DataError(f"{name}={source[name]!r} is not supported, only {value!r}")
    if source.get("hidden_act", "swish") not in ("swish", "silu"):
        raise DataError(f"hidden_act={source['hidden_act']!r} is not supported, only 'swish'")
    fields: dict[str, Any] = {"method": family.method, "qk_norm_eps": 1e-5}
    for key in family.keys:
        fields[key.field] = _read(key, source)
    fields["mlp_dim"] = _mlp_dim(source)
    fields |= _SPECIAL.get(family.method, lambda source: {})(source)
    if family.method == "swa" and fields["window"] is None:
        fields["method"] = "full"
    nested: dict[str, dict[str, Any]] = {}
    for field in [name for name in fields if "." in name]:
        group, _, name = field.partition(".")
        nested.setdefault(group, {})[name] = fields.pop(field)
    # A field's default is an attribute of the class.
    defaults = {group: getattr(TransformerConfig, group) for group in nested}
    fields |= {group: defaults[group].replace(**own) for group, own in nested.items()}
    return TransformerConfig(**(fields | changes))


def _read(key: Key, source: Mapping[str, Any]) -> Any:
    value = source.get(key.name, key.default)
    if value is _REQUIRED:
        raise DataError(f"the configuration lacks {key.name!r}")
    if key.words is None:
        return _number(source, key.name, value) if isinstance(value, int | float) else value
    if not isinstance(value, str) or value not in key.words:
        raise DataError(f"{key.name}={value!r} is none of {', '.join(map(repr, key.words))}")
    return key.words[value]


def _number(source: Mapping[str, Any], name: str, default: Any) -> Any:
    """The number (or bool) under `name`, of a size that arithmetic can bear."""
    value = source.get(name, default)
    if not isinstance(value, int | float) or not abs(value) < 2**53:
        raise DataError(f"{name}={str(value)[:40]!r} is not a number of usable size")
    return value


def _positive(source: Mapping[str, Any], name: str, default: Any = 0) -> Any:
    value = _number(source, name, default)
    if isinstance(value, bool) or value <= 0:
        raise DataError(f"{name}={value!r} is not a number above 0")
    return value


def _flag(source: Mapping[str, Any], name: str, default: bool) -> bool:
    value = source.get(name, default)
    if not isinstance(value, bool):
        raise DataError(f"{name}={str(value)[:40]!r} is neither true nor false")
    return value


def _mlp_dim(source: Mapping[str, Any]) -> int:
    size = source.get("intermediate_size")
    if size is not None:
        return size
    width = _positive(source, "hidden_size") * _positive(source, "hidden_ratio", 4)
    return 256 * math.ceil(int(width * 2 / 3) / 256)


def _ipttcd_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    if source.get("ttt_output_source", "teacher") == "student":
        output = "student"
    elif _flag(source, "ttt_teacher_conv", True) and not _flag(
        source, "ttt_output_use_teacher_conv", True
    ):
        output = "teacher_raw"
    else:
        output = "teacher"
    is_renormed = _flag(source, "ttt_weight_renorm", False)
    chunk, visible = (
        _positive(source, name, default)
        for name, default in (("ttt_chunk", 8192), ("ttt_visible_chunks", 1))
    )
    return {
        "memory.output": output,
        "memory.renorm_chunks": _positive(source, "ttt_update_every", 4) if is_renormed else None,
        "student_window": chunk * visible,
    }


def _deltanet_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    expand_k = _positive(source, "expand_k", 1)
    key_width = _positive(source, "hidden_size") * expand_k
    return {
        "head_dim": int(key_width) // _positive(source, "num_heads"),
        "delta.value_expansion": _positive(source, "expand_v", 1) / expand_k,
    }


def _gated_deltanet_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    return {"delta.value_expansion": _positive(source, "expand_v", 2)}


def _lact_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    rank = _number(source, "w0_w2_low_rank", -1)
    return {
        "lact.low_rank": rank if rank > 0 else None,
        "lact.has_value_silu": not _flag(source, "no_v_silu", False),
        "lact.has_rope": not _flag(source, "ttt_nope", False),
    }


_SPECIAL = {
    "ipttcd": _ipttcd_fields,
    "deltanet": _deltanet_fields,
    "gated_deltanet": _gated_deltanet_fields,
    "lact": _lact_fields,
}


def reference_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of the reference for one of our models: `transformer_config` backwards.

    Raises `UserError` for what the reference cannot express.
    """
    method = "swa" if config.method == "full" else config.method
    family = next((f for f in FAMILIES.values() if f.method == method), None)
    if family is None:
        raise UserError(f"the reference implementation has no method {config.method!r}")
    _check_expressible(config)
    source: dict[str, Any] = {"model_type": family.model_type, "intermediate_size": config.mlp_dim}
    for key in family.keys:
        value: Any = config
        for name in key.field.split("."):
            value = getattr(value, name)
        if key.words is not None:
            value = next(theirs for theirs, ours in key.words.items() if ours == value)
        source[key.name] = list(value) if isinstance(value, tuple) else value
    source |= family.fixed
    match method:
        case "ipttcd":
            memory = config.memory
            source |= {
                "ttt_mode": True,
                "ttt_output_source": "student" if memory.output == "student" else "teacher",
                "ttt_output_use_teacher_conv": memory.output != "teacher_raw",
                "ttt_weight_renorm": memory.renorm_chunks is not None,
                "ttt_update_every": memory.renorm_chunks or 4,
                "ttt_visible_chunks": config.student_window // memory.chunk_size,
            }
        case "ipttt":
            source["ttt_mode"] = True
        case "deltanet":
            head_dim = config.head_dim or config.dim // config.num_heads
            source["expand_k"] = head_dim * config.num_heads / config.dim
            source["expand_v"] = source["expand_k"] * config.delta.value_expansion
        case "gated_deltanet":
            source["head_dim"] = config.head_dim or config.dim // config.num_heads
            source["expand_v"] = config.delta.value_expansion
        case "lact":
            source["w0_w2_low_rank"] = config.lact.low_rank or -1
            source["no_v_silu"] = not config.lact.has_value_silu
            source["ttt_nope"] = not config.lact.has_rope
    return source


def _check_expressible(config: TransformerConfig) -> None:
    if config.has_qk_norm and config.qk_norm_eps != 1e-5:
        raise UserError(f"the reference's q/k norm has eps 1e-5, this model {config.qk_norm_eps}")
    if config.rope.yarn is not None:
        raise UserError("the reference's fast-weight models have no YaRN scaling, this model has")
    if config.method == "ipttcd" and config.student_window % config.memory.chunk_size:
        raise UserError(
            f"the reference's student window is a multiple of the chunk, this model's "
            f"{config.student_window} is none of {config.memory.chunk_size}"
        )
