"""Exports to Hugging Face transformers: plain transformers as Llama, Mistral, Qwen2 or Qwen3, and
models with a memory in their down projections with their own code (`modeling_ttcd.py`)."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ttcd_jax.data.tokenizer import BOS_NAMES, EOS_NAMES, ByteTokenizer, Tokenizer
from ttcd_jax.errors import UserError
from ttcd_jax.files import parse_json
from ttcd_jax.interop.expressed import check_expressed
from ttcd_jax.interop.hugging_face import (
    CONFIG,
    EMBEDDING,
    FAMILIES,
    HEAD,
    OWN_TYPE,
    model_of,
    their_name,
)
from ttcd_jax.interop.reference import Params, model_to_reference
from ttcd_jax.interop.weight_files import cast
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


class Exported(NamedTuple):
    """Tensors by their names in transformers, and the text of every small file."""

    tensors: dict[str, np.ndarray]
    files: dict[str, str]


def export_hugging_face(
    params: Params,
    config: TransformerConfig,
    *,
    length: int,
    metadata: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> Exported:
    """A model for rows of up to `length` tokens: tensors, `config.json`, and the code of a model
    with a memory.

    With the `metadata` of its import from Hugging Face tensors and configuration are those of the
    import, bit for bit; otherwise float32. `dtype` replaces either. Raises `UserError` for a model
    that transformers cannot express and for a value outside `dtype`.
    """
    tensors = {their_name(x): y for x, y in model_to_reference(params, config).items()}
    if metadata is not None:
        text, kinds = metadata["config_json"], metadata["dtypes"]
        if metadata["tied_head"]:
            tensors[HEAD] = tensors[EMBEDDING]
        if dtype is not None:
            source = parse_json(text.encode(), Path(CONFIG))
            source["dtype" if "dtype" in source else "torch_dtype"] = dtype
            text = _json(source)
        kinds = kinds if dtype is None else dict.fromkeys(tensors, dtype)
        return Exported(cast(tensors, kinds), {CONFIG: text})
    name, files = dtype or "float32", {}
    source = {"max_position_embeddings": length, "torch_dtype": name}
    if method_named(config.method).layers == "none":
        source = plain_config(config) | source
    else:
        source = _own_config(config) | source
        files[MODELING.name] = MODELING.read_text()
    return Exported(cast(tensors, dict.fromkeys(tensors, name)), {CONFIG: _json(source)} | files)


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
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "tie_word_embeddings": config.has_tied_head,
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which all versions of transformers read."""
    scaling: dict[str, Any] | None = None
    if rope.linear_factor != 1:
        scaling = {"rope_type": "linear", "factor": rope.linear_factor}
    elif (llama3 := rope.llama3) is not None:
        scaling = {"rope_type": "llama3", "factor": llama3.factor}
        scaling |= {"original_max_position_embeddings": llama3.original_length}
        scaling |= {"high_freq_factor": llama3.fast_turns, "low_freq_factor": llama3.slow_turns}
    elif (yarn := rope.yarn) is not None:
        scaling = {"rope_type": "yarn", "factor": yarn.factor}
        scaling |= {"original_max_position_embeddings": yarn.original_length}
        scaling |= {"beta_fast": yarn.fast_turns, "beta_slow": yarn.slow_turns}
        scaling |= {} if yarn.magnitude is None else {"attention_factor": yarn.magnitude}
    return {"rope_theta": rope.base, "rope_scaling": scaling}


def _own_config(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of a model that `modeling_ttcd.py` computes: our configuration, and the
    keys of transformers. Raises `UserError` for a memory that it does not compute."""
    settings = config.settings
    if not isinstance(settings, PrefixSettings):
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
    files = {"generation_config.json": _json(ids | {"pad_token_id": ends[0]})}
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
    return files | dict(stored) | {_NAMES: _json(named)}


def _byte_tokenizer() -> str:
    """`ByteTokenizer` as a `tokenizer.json`: byte-level BPE without merges, bos before a text."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [x for x in range(256) if x not in visible]
    letters = {chr(x): x for x in visible} | {chr(256 + i): x for i, x in enumerate(hidden)}
    special = {BOS_NAMES[0]: ByteTokenizer.bos_id, EOS_NAMES[0]: ByteTokenizer.eos_id}
    added = [
        {"id": token_id, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for name, token_id in special.items()
    ]
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    bos = {"SpecialToken": {"id": BOS_NAMES[0], "type_id": 0}}
    bos_entry = {"id": BOS_NAMES[0], "ids": [ByteTokenizer.bos_id], "tokens": [BOS_NAMES[0]]}
    return _json(
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": bytes_of | {"use_regex": False},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [bos, *({"Sequence": {"id": x, "type_id": 0}} for x in "AB")],
                "special_tokens": {BOS_NAMES[0]: bos_entry},
            },
            "decoder": bytes_of | {"use_regex": False},
            "model": {"type": "BPE", "vocab": letters | special, "merges": []},
        }
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
