"""Exports to Hugging Face transformers: plain transformers as Llama, Mistral, Qwen2 or Qwen3, and
models with a memory in their down projections, or attention sinks, with their own code
(`modeling_ttcd.py`)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from ttcd_jax.data.tokenizer import BOS_NAMES, EOS_NAMES, ByteTokenizer, Tokenizer
from ttcd_jax.errors import UserError
from ttcd_jax.files import parse_json
from ttcd_jax.interop.checkpoint import CONFIG, Params, as_json, check_expressed, exported
from ttcd_jax.interop.hugging_face import FAMILIES, HUGGING_FACE, OWN_TYPE, ROPES, SIZES, model_of
from ttcd_jax.methods import method_named
from ttcd_jax.methods.in_place import PrefixSettings
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.rope import RopeConfig, pair_frequencies

MODELING = Path(__file__).with_name("modeling_ttcd.py")
# The versions of transformers with which the code was tried: it names them itself.
_LINE = next(x for x in MODELING.read_text().splitlines() if x.startswith("TRIED = "))
TRIED = tuple(re.findall(r"\d[\d.]+", _LINE))
_CLASSES = {"AutoConfig": "TTCDConfig", "AutoModelForCausalLM": "TTCDForCausalLM"}
# Settings that this code does not compute, with the values it assumes.
_ASSUMED = {"renorm_chunks": None, "orthogonalizes_updates": False}
_NAMES, _TOKENIZER = "tokenizer_config.json", "PreTrainedTokenizerFast"
_THEIRS = "Hugging Face transformers"


def export_hugging_face(
    params: Params,
    config: TransformerConfig,
    *,
    length: int,
    metadata: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(tensors by their names in transformers, text of every small file) of a model for rows of up
    to `length` tokens; a model with a memory or attention sinks has a file of code.

    `metadata` and `dtype` as in `exported`. Raises `UserError` for a model that transformers cannot
    express.
    """
    is_own = method_named(config.method).layers != "none"
    is_own |= bool(config.sink_tokens) or config.has_sink_logits

    def describe() -> dict[str, Any]:
        source = _own_config(config) if is_own else plain_config(config)
        return source | {"max_position_embeddings": length}

    tensors, text = exported(params, config, HUGGING_FACE, describe, metadata, dtype)
    code = {MODELING.name: MODELING.read_text()} if is_own else {}
    return tensors, {CONFIG: text} | code


def plain_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of a model without memory, which `model_of` reads back."""
    if config.has_qk_norm and config.qk_norm_eps != config.norm_eps:
        raise UserError(
            f"{_THEIRS} has one eps for all norms, this model norm_eps {config.norm_eps} and "
            f"qk_norm_eps {config.qk_norm_eps}"
        )
    window = config.window if config.method != "full" else None
    kind = "llama" if window is None else "mistral"
    if config.has_qk_norm or config.has_qkv_bias:
        kind = "qwen3" if config.has_qk_norm else "qwen2"
    source = _sizes(config) | {"model_type": kind, "architectures": [FAMILIES[kind].architecture]}
    source |= {"hidden_act": "silu", "rms_norm_eps": config.norm_eps} | _rope(config.rope)
    source |= {"attention_dropout": 0.0, "initializer_range": config.init_std}
    if window is not None:
        source["sliding_window"] = window
        if kind != "mistral":
            source |= {"use_sliding_window": True, "max_window_layers": 0}
            source["layer_types"] = ["sliding_attention"] * config.num_layers
    check_expressed(config, model_of(source), _THEIRS)
    return source


def _sizes(config: TransformerConfig) -> dict[str, Any]:
    return {theirs: getattr(config, ours) for theirs, ours in SIZES.items()} | {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "tie_word_embeddings": config.has_tied_head,
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which all versions of transformers read."""
    scaling = None
    if rope.linear_factor != 1:
        scaling = {"rope_type": "linear", "factor": rope.linear_factor}
    for kind, (_, keys) in ROPES.items():
        if (found := getattr(rope, kind)) is not None:
            values = {theirs: getattr(found, ours) for theirs, ours in keys.items()}
            scaling = {"rope_type": kind} | {x: y for x, y in values.items() if y is not None}
    return {"rope_theta": rope.base, "rope_scaling": scaling}


def _own_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of a model that `modeling_ttcd.py` computes: our configuration, and the
    keys of transformers. Raises `UserError` for a memory that it does not compute."""
    settings = config.settings
    if settings is not None and not isinstance(settings, PrefixSettings):
        raise UserError(
            f"{MODELING.name} has no memory of the method {config.method!r}: export with "
            "--format=reference"
        )
    for name, value in _ASSUMED.items():
        if getattr(settings, name, value) != value:
            raise UserError(
                f"{MODELING.name} does not compute {name}={getattr(settings, name)!r}, only "
                f"{value!r}: export with --format=reference"
            )
    frequencies, magnitude = pair_frequencies(config.rope, config.head_size)
    code = {kind: f"{MODELING.stem}.{name}" for kind, name in _CLASSES.items()}
    return _sizes(config) | {
        "model_type": OWN_TYPE,
        "architectures": [_CLASSES["AutoModelForCausalLM"]],
        "auto_map": code,
        "transformers_version": TRIED[-1],
        "tokenizer_class": _TOKENIZER,
        "model": config.replace(memory=settings).to_dict(),
        "rotary": {"frequencies": [float(x) for x in frequencies], "magnitude": magnitude},
        "sliding_window": config.window,
    }


def text_files(tokenizer: Tokenizer, stored: Mapping[str, str]) -> dict[str, str]:
    """The files that generation in transformers needs besides `tokenizer.json`: the `stored` ones
    of the imported checkpoint, or such that name bos and eos; eos is the padding where there is
    none; the byte tokenizer as a `tokenizer.json`."""
    ends = [tokenizer.eos_id, *tokenizer.stop_ids]
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if ends[1:] else ends[0]}
    files = {"generation_config.json": as_json(ids | {"pad_token_id": ends[0]})}
    names = {"bos_token": BOS_NAMES[0], "eos_token": EOS_NAMES[0]}
    if isinstance(tokenizer, ByteTokenizer):
        files["tokenizer.json"] = _byte_tokenizer()
    else:
        for role, token_id in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
            names[f"{role}_token"] = tokenizer.token(token_id)
    names |= {"tokenizer_class": _TOKENIZER, "pad_token": names["eos_token"]}
    settings = {"padding_side": "left", "model_input_names": ["input_ids", "attention_mask"]}
    named = names | settings
    if (text := stored.get(_NAMES)) is not None:
        named = parse_json(text.encode(), Path(_NAMES))
        named["pad_token"] = named.get("pad_token") or named.get("eos_token") or names["eos_token"]
    return files | dict(stored) | {_NAMES: as_json(named)}


def _byte_tokenizer() -> str:
    """`ByteTokenizer` as a `tokenizer.json`: byte-level BPE without merges, bos before a text."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [x for x in range(256) if x not in visible]
    letters = {chr(x): x for x in visible} | {chr(256 + i): x for i, x in enumerate(hidden)}
    bos, eos = BOS_NAMES[0], EOS_NAMES[0]
    special = {bos: ByteTokenizer.bos_id, eos: ByteTokenizer.eos_id}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters | special, merges=[]))
    tokenizer.add_special_tokens([bos, eos])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, special[bos])]
    )
    return tokenizer.to_str(pretty=True)
