"""Checkpoints of Hugging Face transformers, both ways: models of the families Llama (SmolLM2),
Mistral, Qwen2 and Qwen3, and models with a memory in their down projections, with their own code
(`modeling_ttcd.py`). Weights are read tensor by tensor while they are written into a run directory,
in the dtype that they have."""

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ttcd_jax.data.tokenizer import (
    BOS_NAMES,
    EOS_NAMES,
    TEXT_FILES,
    ByteTokenizer,
    Tokenizer,
    bytes_as_json,
)
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import parse_json
from ttcd_jax.inference.state import reads_ahead
from ttcd_jax.interop.checkpoint import Format, as_json, exported, open_checkpoint
from ttcd_jax.methods import method_named
from ttcd_jax.methods.in_place import PrefixSettings
from ttcd_jax.methods.registry import Source
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.rope import Llama3Config, RopeConfig, YarnConfig, pair_frequencies
from ttcd_jax.precision import Precision

OWN_TYPE = "ttcd"  # of exports that `modeling_ttcd.py` computes
MODELING = Path(__file__).with_name("modeling_ttcd.py")
# The versions of transformers with which the code was tried: it names them itself.
_LINE = next(x for x in MODELING.read_text().splitlines() if x.startswith("TRIED = "))
TRIED = tuple(re.findall(r"\d[\d.]+", _LINE))
_CLASSES = {"AutoConfig": "TTCDConfig", "AutoModelForCausalLM": "TTCDForCausalLM"}
# Settings that this code does not compute, with the values it assumes.
_ASSUMED = {"renorm_chunks": (None,), "orthogonalizes_updates": (False,), "gate": ("student",)}
_ASSUMED |= {"error": ("difference", "learned")}
_NAMES, _TOKENIZER = "tokenizer_config.json", "PreTrainedTokenizerFast"
_TITLE = "Hugging Face transformers"
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
    return functools.reduce(lambda found, parts: found.replace(*parts), _RENAMED, name)


class Family(NamedTuple):
    """A `model_type`: its class, the parts of its layers, and the defaults of absent keys of a
    `config.json`, where they are not those of `_DEFAULTS`."""

    architecture: str
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    windows: Literal["never", "by flag", "always"] = "never"  # of `sliding_window`
    defaults: Mapping[str, Any] = {}


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096}
_QWEN3, _MISTRAL = _QWEN | {"head_dim": 128}, _QWEN | {"num_key_value_heads": 8}
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", windows="always", defaults=_MISTRAL),
    "qwen2": Family("Qwen2ForCausalLM", has_qkv_bias=True, windows="by flag", defaults=_QWEN),
    "qwen3": Family("Qwen3ForCausalLM", has_qk_norm=True, windows="by flag", defaults=_QWEN3),
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
# Keys, the only values of them that are read, besides null, and the needs of any other value.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "another activation"),
    "attention_bias": ((False,), "a bias of attention's output projection"),
    "mlp_bias": ((False,), "biases of the MLP"),
    "quantization_config": ((), "quantised weights: save the model in bfloat16"),
    "partial_rotary_factor": ((1,), "rotary embedding of a part of each head"),
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


def model_of(source: Mapping[str, Any], precision: Precision = Precision()) -> TransformerConfig:
    """Our configuration of the model that a `config.json` of transformers describes; that of an
    export of ours has its own, but for the dtype of parameters. Raises `DataError` for an
    unsupported family or option, naming its key, and for a senseless value."""
    kind = source.get("model_type")
    if kind == OWN_TYPE:
        if not isinstance(model := source.get("model"), dict):
            raise DataError("model is no configuration of a model: export the run again")
        config = TransformerConfig.from_dict(model)
        return config.replace(precision=config.precision.replace(param=precision.param))
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise DataError(
            f"model_type {kind!r} is not one of {', '.join(FAMILIES)}: a model with other norms, "
            "attention or experts needs its own layers"
        )
    family = FAMILIES[kind]
    values = Source({**_DEFAULTS, **family.defaults, **source})
    for key, (allowed, need) in _ONLY.items():
        if source.get(key) not in (None, *allowed):
            raise DataError(f"{key}={str(source[key])[:80]} is not supported: it needs {need}")
    sizes: dict[str, Any] = {ours: values.whole(theirs) for theirs, ours in SIZES.items()}
    if values.values.get("head_dim") is not None:
        sizes["head_dim"] = values.whole("head_dim")
    window = _window(values, family)
    return TransformerConfig(
        **sizes,
        num_kv_heads=values.values.get("num_key_value_heads"),
        norm_eps=values.positive("rms_norm_eps"),
        qk_norm_eps=values.positive("rms_norm_eps"),
        init_std=values.number("initializer_range", 0.02),
        has_tied_head=values.flag("tie_word_embeddings", False),
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.has_qkv_bias,
        rope=_rope(values),
        window=window,
        method="full" if window is None else "swa",
        precision=precision,
    )


def _window(values: Source, family: Family) -> int | None:
    """The window of all layers, which counts the query. Raises `DataError` for windows in some, and
    for kinds of layers that transformers ignores or does not compute."""
    source, count = values.values, values.whole("num_hidden_layers")
    by_flag = family.windows == "by flag" and source.get(_FLAG) is not None
    is_on = family.windows == "always" or (by_flag and values.flag(_FLAG, False))
    is_on = is_on and source.get("sliding_window") is not None
    first = values.number("max_window_layers", 28) if by_flag else 0
    named = ("full_attention", "sliding_attention")
    layers = source.get("layer_types")
    if layers is None:
        layers = [named[is_on and layer >= first] for layer in range(count)]
    if not isinstance(layers, list) or len(layers) != count:
        raise DataError(f"layer_types={str(layers)[:80]} is no list of {count}, a kind per layer")
    allowed = named if by_flag and is_on else [named[is_on]]
    if len({*map(str, layers)}) > 1 or layers[0] not in allowed:
        kinds = ", ".join(sorted({*map(str, layers)}))
        raise DataError(
            f"layer_types are {kinds}: it needs other attention in some layers, or than "
            f"model_type, sliding_window and {_FLAG} say"
        )
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
    if str(kind) not in ROPES:
        raise DataError(f"rope_type {kind!r} is not one of default, linear, {', '.join(ROPES)}")
    config, keys = ROPES[kind]
    needed = keys.keys() - (_YARN.keys() - scaling.keys())
    fields = {keys[name]: inner.positive(name) for name in keys if name in needed}
    if values.values.get(_LENGTH) not in (None, fields["original_length"]):
        text = f"{_LENGTH}={str(values.values[_LENGTH])[:80]} is for some versions of transformers"
        raise DataError(f"{text} alone: write the one that is meant into rope_scaling too")
    if kind == "yarn":
        if scaling.get("truncate", True) is not True:
            raise DataError("truncate=false of YaRN is not supported: corners at whole pairs alone")
        scales = [inner.number(name, 0) for name in ("mscale", "mscale_all_dim")]
        if all(scales):
            above, below = (0.1 * x * math.log(max(fields["factor"], 1)) + 1 for x in scales)
            fields.setdefault("magnitude", above / below)
    return RopeConfig(base=base, **{kind: config(**fields)})


def source_of(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of a model, of a family or, with a memory, of `modeling_ttcd.py`; the
    inverse of `model_of`. Raises `UserError` for what it cannot say."""
    sizes = {theirs: getattr(config, ours) for theirs, ours in SIZES.items()} | {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "tie_word_embeddings": config.has_tied_head,
    }
    return sizes | (_own_keys(config) if is_own(config) else _family_keys(config))


def is_own(config: TransformerConfig) -> bool:
    """Whether `modeling_ttcd.py` computes the model: one with a memory or attention sinks."""
    has_memory = method_named(config.method).layers != "none"
    return has_memory or bool(config.sink_tokens) or config.has_sink_logits


def _family_keys(config: TransformerConfig) -> dict[str, Any]:
    if config.has_qk_norm and config.qk_norm_eps != config.norm_eps:
        raise UserError(
            f"{_TITLE} has one eps for all norms, this model norm_eps {config.norm_eps} and "
            f"qk_norm_eps {config.qk_norm_eps}"
        )
    window = config.window if config.method != "full" else None
    kind = "llama" if window is None else "mistral"
    if config.has_qk_norm or config.has_qkv_bias:
        kind = "qwen3" if config.has_qk_norm else "qwen2"
    scaling = None
    if config.rope.linear_factor != 1:
        scaling = {"rope_type": "linear", "factor": config.rope.linear_factor}
    for name, (_, keys) in ROPES.items():
        if (found := getattr(config.rope, name)) is not None:
            values = {theirs: getattr(found, ours) for theirs, ours in keys.items()}
            scaling = {"rope_type": name} | {x: y for x, y in values.items() if y is not None}
    source = {
        "model_type": kind,
        "architectures": [FAMILIES[kind].architecture],
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.base,
        "rope_scaling": scaling,  # here, all versions of transformers read it
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
    }
    if window is not None:
        source["sliding_window"] = window
        if kind != "mistral":
            source |= {"use_sliding_window": True, "max_window_layers": 0}
            source["layer_types"] = ["sliding_attention"] * config.num_layers
    return source


def _own_keys(config: TransformerConfig) -> dict[str, Any]:
    settings, remedy = config.settings, "export with --format=reference"
    if settings is not None and not isinstance(settings, PrefixSettings):
        raise UserError(f"{MODELING.name} has no memory of the method {config.method!r}: {remedy}")
    for name, values in _ASSUMED.items():
        if (found := getattr(settings, name, values[0])) not in values:
            known = " and ".join(map(repr, values))
            raise UserError(
                f"{MODELING.name} does not compute {name}={found!r}, only {known}: {remedy}"
            )
    if reads_ahead(config):
        raise UserError(
            "the model reads features of later tokens (is_conv_causal=False): it cannot generate, "
            f"as {_TITLE} would let it; {remedy}"
        )
    frequencies, magnitude = pair_frequencies(config.rope, config.head_size)
    return {
        "model_type": OWN_TYPE,
        "architectures": [_CLASSES["AutoModelForCausalLM"]],
        "auto_map": {kind: f"{MODELING.stem}.{name}" for kind, name in _CLASSES.items()},
        "transformers_version": TRIED[-1],
        "tokenizer_class": _TOKENIZER,
        "model": config.replace(memory=settings).to_dict(),
        "rotary": {"frequencies": [float(x) for x in frequencies], "magnitude": magnitude},
        "sliding_window": config.window,
    }


HUGGING_FACE = Format(
    "huggingface",
    _TITLE,
    model_of=model_of,
    source_of=source_of,
    unread=lambda source: sorted(source.keys() - _SILENT),
    dropped=("rotary_emb.inv_freq",),  # stored by old versions
    renamed=their_name,
    texts=TEXT_FILES,
)
open_hugging_face = functools.partial(open_checkpoint, form=HUGGING_FACE)
export_hugging_face = functools.partial(exported, form=HUGGING_FACE)


def text_files(tokenizer: Tokenizer, stored: Mapping[str, str]) -> dict[str, str]:
    """The files that generation in transformers needs besides `tokenizer.json`: the `stored` ones
    of the imported checkpoint, or such that name bos and eos; eos is the padding where there is
    none; the byte tokenizer as a `tokenizer.json`."""
    files, ends = {}, [tokenizer.eos_id, *tokenizer.stop_ids]
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if ends[1:] else ends[0]}
    files["generation_config.json"] = as_json(ids | {"pad_token_id": ends[0]})
    if isinstance(tokenizer, ByteTokenizer):
        files["tokenizer.json"], bos, eos = bytes_as_json(), BOS_NAMES[0], EOS_NAMES[0]
    else:
        bos, eos = (tokenizer.token(x) for x in (tokenizer.bos_id, tokenizer.eos_id))
    named = {"bos_token": bos, "eos_token": eos, "tokenizer_class": _TOKENIZER, "pad_token": eos}
    named |= {"padding_side": "left", "model_input_names": ["input_ids", "attention_mask"]}
    if (text := stored.get(_NAMES)) is not None:
        named = parse_json(text.encode(), Path(_NAMES))
        named["pad_token"] = named.get("pad_token") or named.get("eos_token") or eos
    return files | dict(stored) | {_NAMES: as_json(named)}
