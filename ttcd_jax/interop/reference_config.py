"""Checkpoints of the reference implementation, by a table for every method
(`methods.registry.Reference`). A `config.json` omits defaults, which differ between model classes:
an absent key takes the default of the table. A `DataError` names a setting that the reference's
code supports and ours does not."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from ttcd_jax.errors import DataError, UserError
from ttcd_jax.interop.checkpoint import Format, exported, open_checkpoint
from ttcd_jax.methods import METHODS, Method, method_named
from ttcd_jax.methods.registry import REQUIRED, Key, Reference, Source
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.rope import RopeConfig
from ttcd_jax.precision import Precision

_PLAIN = "transformer"  # the model of a method whose memory is switched off
# Keys without effect on the forward pass, or read outside the tables.
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


def families() -> dict[str, tuple[Method, Reference]]:
    """The method of every `model_type`; if two methods share one, the last."""
    return {
        model_type: (method, method.reference)
        for method in METHODS.values()
        if method.reference is not None
        for model_type in method.reference.model_types
    }


def _family_of(source: Mapping[str, Any]) -> tuple[Method, Reference]:
    """The method of a model, plain if its memory is off. Raises `DataError` for an unknown one."""
    name, known = source.get("model_type"), families()
    if not isinstance(name, str) or name not in known:
        names = ", ".join(sorted(known))
        raise DataError(f"model_type {name!r} is not one of the reference's: {names}")
    method, reference = known[name]
    is_off = reference.has_switch and not Source(source).flag("ttt_mode", True)
    is_empty = method.layers == "fast" and source.get("ttt_layers") == []
    return known[_PLAIN if is_off or is_empty else name]


def unread_keys(source: Mapping[str, Any]) -> list[str]:
    """Keys of `config.json` that no table knows, to report to the user."""
    # Where the memory is off, the keys of the class itself are known, though without effect.
    tables = (_family_of(source)[1], families()[source["model_type"]][1])
    known = _SILENT.union(*({key.name for key in r.keys} | r.fixed.keys() for r in tables))
    return sorted(set(source) - known)


def transformer_config(
    source: Mapping[str, Any], precision: Precision = Precision()
) -> TransformerConfig:
    """Our configuration of the model that a `config.json` of the reference describes. Its q/k norm
    always has eps 1e-5. Raises `DataError` for what is unknown, missing or not supported."""
    method, reference = _family_of(source)
    for name, value in reference.fixed.items():
        if source.get(name, value) != value:
            raise DataError(f"{name}={source[name]!r} is not supported, only {value!r}")
    if source.get("hidden_act", "swish") not in ("swish", "silu"):
        raise DataError(f"hidden_act={source['hidden_act']!r} is not supported, only 'swish'")
    values = Source(source)
    fields: dict[str, Any] = {"method": method.name}
    fields |= {key.field: _value(key, values) for key in reference.keys}
    fields["mlp_dim"] = source.get("intermediate_size")
    if fields["mlp_dim"] is None:
        width = values.positive("hidden_size") * values.positive("hidden_ratio", 4)
        fields["mlp_dim"] = 256 * math.ceil(int(width * 2 / 3) / 256)
    fields = unflatten_dict(fields | reference.read(values), sep=".")
    fields |= {"qk_norm_eps": 1e-5, "rope": RopeConfig(**fields.get("rope", {}))}
    if method.settings is not None:
        fields["memory"] = method.settings(**fields.get("memory", {}))
    return TransformerConfig(precision=precision, **fields)


def _value(key: Key, source: Source) -> Any:
    value = source.values.get(key.name, key.default)
    if key.default is REQUIRED and key.name not in source.values:
        raise DataError(f"the configuration lacks {key.name!r}")
    if key.choices is None:
        return source.number(key.name, value) if isinstance(value, int | float) else value
    if not isinstance(value, str) or value not in key.choices:
        raise DataError(f"{key.name}={value!r} is not one of {', '.join(map(repr, key.choices))}")
    return key.choices[value]


def reference_config(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `transformer_config`: the reference's `config.json` of one of our models.
    Raises `UserError` for a model that the reference cannot express."""
    reference = method_named(config.method).reference
    if reference is None:
        raise UserError(f"the reference implementation has no method {config.method!r}")
    if config.has_qk_norm and config.qk_norm_eps != 1e-5:
        raise UserError(f"the reference's q/k norm has eps 1e-5, this model {config.qk_norm_eps}")
    if config.rope != RopeConfig(base=config.rope.base):
        raise UserError("the reference's models scale no positions, this model does")
    source = {"model_type": reference.model_types[0], "intermediate_size": config.mlp_dim}
    for key in reference.keys:
        group, _, name = key.field.rpartition(".")
        holder = {"": config, "rope": config.rope, "memory": config.settings}[group]
        value: Any = getattr(holder, name)
        if key.choices is not None:
            # An initialisation that the reference lacks changes no output.
            names = (theirs for theirs, ours in key.choices.items() if ours == value)
            value = next(names, key.default)
        source[key.name] = list(value) if isinstance(value, tuple) else value
    source |= dict(reference.fixed) | ({"ttt_mode": True} if reference.has_switch else {})
    return source | reference.write(config, config.settings)


REFERENCE = Format(
    "reference",
    "the reference implementation",
    model_of=transformer_config,
    source_of=reference_config,
    unread=unread_keys,
    dropped=(".ttt_lr", "inv_freq"),  # stored by old runs
    dtype=np.dtype(np.float32),
)
open_reference = functools.partial(open_checkpoint, form=REFERENCE)
export_reference = functools.partial(exported, form=REFERENCE)
