"""Checkpoints of Hugging Face transformers: models of the families Llama (Llama, SmolLM2), Qwen2
and Qwen3.

A folder has `config.json`, weights (.safetensors, one file or shards), and usually
`tokenizer.json`, `tokenizer_config.json` and `generation_config.json`. Weights are read tensor by
tensor while they are written into a run directory, in the dtype that they have.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ttcd_jax.data.tokenizer import TEXT_FILES
from ttcd_jax.errors import DataError
from ttcd_jax.interop.checkpoint import (
    Format,
    ImportedModel,
    as_json,
    imported,
    open_checkpoint,
)
from ttcd_jax.interop.gguf_files import open_gguf
from ttcd_jax.methods.registry import Source
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.rope import Llama3Config, RopeConfig, YarnConfig
from ttcd_jax.precision import Precision

OWN_TYPE = "ttcd"  # of exports that `modeling_ttcd.py` computes
_FLAG = "use_sliding_window"
# Parts of names: the reference implementation's, and those of all families here.
_RENAMED = (
    ("model.embeddings.", "model.embed_tokens."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".attn.", ".self_attn."),
)


def their_name(name: str) -> str:
    """The name in transformers of a tensor of the reference implementation. Tensors of a memory
    keep their names."""
    for ours, theirs in _RENAMED:
        name = name.replace(ours, theirs)
    return name


class Family(NamedTuple):
    """A `model_type`: its class, the parts of its layers, and the defaults of absent keys of a
    `config.json`, where they are not those of `_DEFAULTS`."""

    architecture: str
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    windows: Literal["never", "by flag", "always"] = "never"  # of `sliding_window`
    defaults: Mapping[str, Any] = {}


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096}
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family(
        "MistralForCausalLM",
        windows="always",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", has_qkv_bias=True, windows="by flag", defaults=_QWEN),
    "qwen3": Family(
        "Qwen3ForCausalLM", has_qk_norm=True, windows="by flag", defaults={**_QWEN, "head_dim": 128}
    ),
}
# By `rope_type`, the field of `RopeConfig`: its class, and the field of each of their keys.
_LENGTH = "original_max_position_embeddings"
_SHARED = {"factor": "factor", _LENGTH: "original_length"}
_LLAMA3 = {"high_freq_factor": "fast_turns", "low_freq_factor": "slow_turns"}
_YARN = {"beta_fast": "fast_turns", "beta_slow": "slow_turns", "attention_factor": "magnitude"}
ROPES = {"llama3": (Llama3Config, _SHARED | _LLAMA3), "yarn": (YarnConfig, _SHARED | _YARN)}
# Their name and ours of sizes, which are whole numbers.
SIZES = {"vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "mlp_dim"}
SIZES |= {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "rope_theta": 10_000.0}
# Keys, the only values of them that are read, and the needs of any other value.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "another activation"),
    "attention_bias": ((False,), "a bias of attention's output projection"),
    "mlp_bias": ((False,), "biases of the MLP"),
    "quantization_config": ((None,), "quantised weights: save the model in bfloat16"),
    "partial_rotary_factor": ((None, 1, 1.0), "rotary embedding of a part of each head"),
}
# Keys that are read elsewhere, or have no effect on a forward pass.
_SILENT = {
    *("architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id"),
    *("head_dim", "layer_types", "max_position_embeddings", "max_window_layers", "model"),
    *("model_type", "num_key_value_heads", "pad_token_id", "pretraining_tp", "rope_interleaved"),
    *("rope_parameters", "rope_scaling", "rotary", "sliding_window", "tie_word_embeddings"),
    *("torch_dtype", "transformers_version", "use_cache", _FLAG),
    *SIZES,
    *_DEFAULTS,
    *_ONLY,
}  # fmt: skip


def model_of(source: Mapping[str, Any], precision: Precision | None = None) -> TransformerConfig:
    """Our configuration of the model that a `config.json` of transformers describes. Raises
    `DataError` for an unsupported family or option, naming its key, and for a senseless value."""
    kind = source.get("model_type")
    if kind == OWN_TYPE:
        return _own_model(source, precision)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise DataError(
            f"model_type {kind!r} is none of {', '.join(FAMILIES)}: a model with other norms, "
            "attention or experts needs layers of its own"
        )
    family = FAMILIES[kind]
    values = Source({**_DEFAULTS, **family.defaults, **source})
    for key, (allowed, need) in _ONLY.items():
        if key in source and source[key] not in allowed and source[key] is not None:
            raise DataError(f"{key}={str(source[key])[:80]} is not supported: it needs {need}")
    sizes: dict[str, Any] = {ours: values.whole(theirs) for theirs, ours in SIZES.items()}
    head_dim, window = values.values.get("head_dim"), _window(values, family)
    return TransformerConfig(
        **sizes,
        num_kv_heads=values.values.get("num_key_value_heads"),
        head_dim=None if head_dim is None else values.whole("head_dim"),
        norm_eps=values.positive("rms_norm_eps"),
        qk_norm_eps=values.positive("rms_norm_eps"),
        init_std=values.number("initializer_range", 0.02),
        has_tied_head=values.flag("tie_word_embeddings", False),
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.has_qkv_bias,
        rope=_rope(values),
        window=window,
        method="full" if window is None else "swa",
        precision=precision or Precision(),
    )


HUGGING_FACE = Format(
    "huggingface",
    model_of=model_of,
    unread=lambda source: sorted(source.keys() - _SILENT),
    dropped=("rotary_emb.inv_freq",),  # stored by old versions
    renamed=their_name,
    texts=TEXT_FILES,
)


def open_hugging_face(path: Path) -> ImportedModel:
    """`open_checkpoint`. All parameters have the widest dtype of the files, bfloat16 as a rule, in
    which the model then computes too (float32 where the files are float16)."""
    return open_checkpoint(path, HUGGING_FACE)


def open_gguf_file(path: Path) -> tuple[ImportedModel, dict[str, str]]:
    """The model in a GGUF file, dequantized to float32, and the contents of the files that a folder
    of transformers would have for its texts. Raises as `open_gguf` and `open_checkpoint` do."""
    found = open_gguf(path)
    architecture = FAMILIES[found.config["model_type"]].architecture
    source = {"architectures": [architecture], "torch_dtype": "float32"} | found.config
    texts = {name: text for name, text in found.texts.items() if name in TEXT_FILES}
    text = as_json(source)
    model = imported(path, HUGGING_FACE, source, found.weights, [path], text, texts)
    return model._replace(metadata=model.metadata | {"dequantized": found.types}), found.texts


def _own_model(source: Mapping[str, Any], precision: Precision | None) -> TransformerConfig:
    """The configuration inside of an export of ours, with the dtype of its parameters."""
    model = source.get("model")
    if not isinstance(model, dict):
        raise DataError("model is no configuration of a model: export the run again")
    config = TransformerConfig.from_dict(model)
    if precision is None:
        return config
    return config.replace(precision=config.precision.replace(param=precision.param))


def _window(values: Source, family: Family) -> int | None:
    """The window of all layers, which counts the query. Raises `DataError` for windows in some."""
    source, count = values.values, values.whole("num_hidden_layers")
    by_flag = family.windows == "by flag" and source.get(_FLAG) is not None
    is_on = family.windows == "always" or (by_flag and values.flag(_FLAG, False))
    first = count
    if is_on and source.get("sliding_window") is not None:
        first = values.number("max_window_layers", 28) if by_flag else 0
    named = ("full_attention", "sliding_attention")
    layers = source.get("layer_types")
    if layers is None:
        layers = [named[layer >= first] for layer in range(count)]
    if not isinstance(layers, list) or len(layers) != count:
        raise DataError(f"layer_types={str(layers)[:80]} is no list of {count}, a kind per layer")
    if len({*map(str, layers)}) > 1 or layers[0] not in named:
        kinds = ", ".join(sorted({*map(str, layers)}))
        raise DataError(f"layer_types are {kinds}: it needs other attention in some layers")
    return values.whole("sliding_window") if layers[0] == named[1] else None


def _rope(values: Source) -> RopeConfig:
    """From `rope_theta` and `rope_scaling`, or both in `rope_parameters` (transformers 5, where
    `rope_scaling` has precedence)."""
    scaling = values.values.get("rope_scaling") or values.values.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise DataError(f"rope_scaling={str(scaling)[:80]} is no object")
    if kinds := [name for name, x in scaling.items() if isinstance(x, dict)]:
        raise DataError(f"rope_parameters of {', '.join(kinds)} alone: layers must have one rope")
    scaling = {name: x for name, x in scaling.items() if x is not None}
    length = values.values.get("max_position_embeddings", 0)
    inner = Source({"rope_theta": values.values["rope_theta"], _LENGTH: length, **scaling})
    base = inner.positive("rope_theta")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise DataError("partial_rotary_factor is not supported: rotary embedding of whole heads")
    if kind == "default":
        return RopeConfig(base=base)
    if kind == "linear":
        return RopeConfig(base=base, linear_factor=inner.positive("factor"))
    if kind not in ROPES:
        raise DataError(f"rope_type {kind!r} is none of default, linear, {', '.join(ROPES)}")
    config, keys = ROPES[kind]
    needed = keys.keys() - (_YARN.keys() - scaling.keys())
    fields = {keys[name]: inner.positive(name) for name in keys if name in needed}
    if kind == "yarn":
        if scaling.get("truncate", True) is not True:
            raise DataError("truncate=false of YaRN is not supported: corners at whole pairs alone")
        scales = [inner.number(name, 0) for name in ("mscale", "mscale_all_dim")]
        if all(scales):
            above, below = (0.1 * x * math.log(max(fields["factor"], 1)) + 1 for x in scales)
            fields.setdefault("magnitude", above / below)
    return RopeConfig(base=base, **{kind: config(**fields)})
