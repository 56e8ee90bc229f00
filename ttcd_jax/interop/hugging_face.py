"""Checkpoints of Hugging Face transformers: models of the families Llama (Llama, SmolLM2), Qwen2
and Qwen3.

A folder has `config.json`, weights (.safetensors, one file or shards), and usually
`tokenizer.json`, `tokenizer_config.json` and `generation_config.json`. Weights are read tensor by
tensor while they are written into a run directory, in the dtype that they have.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from ttcd_jax.data.tokenizer import TEXT_FILES
from ttcd_jax.errors import CheckpointError, DataError, UserError
from ttcd_jax.files import read_json, read_text, sha256
from ttcd_jax.interop.gguf_files import open_gguf
from ttcd_jax.interop.reference import Layout, names_on_disk
from ttcd_jax.interop.weight_files import WeightFiles, open_weights
from ttcd_jax.methods.registry import Source
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.rope import Llama3Config, RopeConfig, YarnConfig
from ttcd_jax.precision import Precision
from ttcd_jax.train.checkpoint import StreamedLeaf
from ttcd_jax.train.layers_on_disk import misfit, stored_params

CONFIG = "config.json"
OWN_TYPE = "ttcd"  # of exports that `modeling_ttcd.py` computes
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_DROPPED = "rotary_emb.inv_freq"  # stored by old versions; the configuration determines it
_FLAG = "use_sliding_window"
# Parts of names: the reference implementation's, and those of all families here.
_RENAMED = (
    ("model.embeddings.", "model.embed_tokens."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".attn.", ".self_attn."),
)


class Family(NamedTuple):
    """A `model_type`: its class, what its layers have, and the values of keys that a `config.json`
    lacks, where they are not those of `_DEFAULTS`."""

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
        "Qwen3ForCausalLM",
        has_qk_norm=True,
        windows="by flag",
        defaults={**_QWEN, "head_dim": 128},
    ),
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "rope_theta": 10_000.0}
# Keys of which only these values are read, and what any other would need.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "another activation"),
    "attention_bias": ((False,), "a bias of attention's output projection"),
    "mlp_bias": ((False,), "biases of the MLP"),
    "quantization_config": ((None,), "quantised weights: save the model in bfloat16"),
    "partial_rotary_factor": ((None, 1, 1.0), "rotary embedding of a part of each head"),
}
# Keys that are read elsewhere, or that no forward pass depends on.
_SILENT = {
    *("architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id"),
    *("head_dim", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings"),
    *("max_window_layers", "model_type", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "pad_token_id", "pretraining_tp", "rope_interleaved"),
    *("model", "rope_parameters", "rope_scaling", "rotary", "sliding_window"),
    *("tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache"),
    *("vocab_size", _FLAG),
    *_DEFAULTS,
    *_ONLY,
}  # fmt: skip


class ImportedModel(NamedTuple):
    """Parameters as a nested dict by their names on disk, the configuration of their model, and the
    facts of the files (ready for JSON)."""

    params: dict[str, Any]
    config: TransformerConfig
    facts: dict[str, Any]


def open_hugging_face(path: Path) -> ImportedModel:
    """The model in a folder of transformers; nothing but headers is read yet.

    All parameters have the widest dtype of the files, bfloat16 as a rule, in which the model then
    computes too (float32 where the files are float16). A tied model takes the embedding. Raises
    `DataError` for a file that is missing or damaged and for a model that we do not support, by its
    key, `CheckpointError` for names or shapes that do not fit `config.json`.
    """
    if not path.is_dir():
        raise DataError(f"{path} is no folder with {CONFIG} and weights")
    source, weights = read_json(path / CONFIG), open_weights(path)
    texts = (path / name for name in TEXT_FILES)
    texts = {file.name: read_text(file) for file in texts if file.is_file()}
    facts = {"config_json": (path / CONFIG).read_bytes().decode(), "text_files": texts}
    files = path / CONFIG, *weights.files
    return imported_model(source, weights, path, files, facts)


def open_gguf_file(path: Path) -> tuple[ImportedModel, dict[str, str]]:
    """The model in a GGUF file, dequantized to float32, and the content of the files that a folder
    of transformers would have for its texts. Raises as `open_gguf` and `open_hugging_face` do."""
    if not path.is_file():
        raise DataError(f"{path} is no GGUF file")
    found = open_gguf(path)
    architecture = FAMILIES[found.config["model_type"]].architecture
    source = {"architectures": [architecture], "torch_dtype": "float32"} | found.config
    texts = {name: text for name, text in found.texts.items() if name in TEXT_FILES}
    facts = {"config_json": json.dumps(source, indent=2), "text_files": texts}
    facts["dequantized"] = found.types
    return imported_model(source, found.weights, path, [path], facts), found.texts


def imported_model(
    source: Mapping[str, Any],
    weights: WeightFiles,
    path: Path,
    files: Sequence[Path],
    facts: Mapping[str, Any],
) -> ImportedModel:
    """The model of the `config.json` `source` with these weights. `files`, the first of which says
    what `source` has, are named with their digests in the facts."""
    own = source.get("model")
    counts = source.get("num_hidden_layers"), isinstance(own, dict) and own.get("num_layers")
    for layers in counts:
        if isinstance(layers, int) and layers > len(weights):  # before anything is built per layer
            problem = f"has {layers} layers, {path} {len(weights)} tensors"
            raise CheckpointError(f"{files[0]} {problem}")
    kinds = {tensor.dtype for tensor in weights.stored.values()}
    dtype = functools.reduce(jnp.promote_types, kinds)
    try:
        config = model_of(source, _precision(dtype))
    except UserError as error:
        raise DataError(f"{files[0]}: {error}") from error
    dropped = [name for name in weights if name.endswith(_DROPPED)]
    is_tied = config.has_tied_head and HEAD in weights.stored
    unused = {*dropped, *([HEAD] if is_tied else [])}
    wanted = stored_params(config)
    places = {their_name(name): place for name, place in names_on_disk(config).items()}
    places = {name: place for name, place in places.items() if place[0] in wanted}
    stored = {name: x for name, x in weights.stored.items() if name not in unused}
    if problem := misfit(_theirs(places, wanted), stored):
        raise CheckpointError(f"{path} is not the model that it describes: {problem}")
    params: dict[str, Any] = {
        ours: _leaf(weights, name, layout, wanted[ours].shape, dtype)
        for name, (ours, layout) in places.items()
    }
    found = {
        "format": "huggingface",
        "path": str(path.absolute()),
        "files": {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files
        },
        "model_type": source["model_type"],
        "num_parameters": sum(math.prod(x.shape) for x in params.values()),
        "dropped": dropped,
        "tied_head": _tied_head(weights) if is_tied else None,
        "ignored_keys": sorted(source.keys() - _SILENT),
        "dtypes": {name: weights.stored[name].dtype.name for name in weights},
    }
    return ImportedModel(unflatten_dict(params, sep="/"), config, {**facts, **found})


def their_name(name: str) -> str:
    """The name in transformers of a tensor of the reference implementation. Tensors of a memory
    keep their names."""
    for ours, theirs in _RENAMED:
        name = name.replace(ours, theirs)
    return name


def _leaf(
    weights: WeightFiles, name: str, layout: Layout, shape: tuple[int, ...], dtype: np.dtype
) -> StreamedLeaf:
    def read() -> np.ndarray:
        return np.ascontiguousarray(layout.to_ours(weights[name]), dtype)

    return StreamedLeaf(shape, dtype, read)


def _theirs(places: Mapping[str, tuple[str, Layout]], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes that their tensors have."""
    return {
        name: jax.eval_shape(layout.to_theirs, ours[path])
        for name, (path, layout) in places.items()
    }


def _precision(dtype: np.dtype) -> Precision:
    name: Any = dtype.name
    return Precision(param=name, compute="bfloat16" if name == "bfloat16" else "float32")


def _tied_head(weights: WeightFiles) -> str:
    is_equal = np.array_equal(weights[HEAD], weights[EMBEDDING])
    return "equal to the embedding" if is_equal else "differs from the embedding, not used"


def model_of(source: Mapping[str, Any], precision: Precision | None = None) -> TransformerConfig:
    """Our configuration of the model that a `config.json` of transformers describes. Raises
    `DataError` for a family or an option that we do not support, naming its key, and for a value
    that makes no sense."""
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
    head_dim, window = values.values.get("head_dim"), _window(values, family)
    return TransformerConfig(
        vocab_size=values.whole("vocab_size"),
        dim=values.whole("hidden_size"),
        num_layers=values.whole("num_hidden_layers"),
        num_heads=values.whole("num_attention_heads"),
        num_kv_heads=values.values.get("num_key_value_heads"),
        head_dim=None if head_dim is None else values.whole("head_dim"),
        mlp_dim=values.whole("intermediate_size"),
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
    inner = Source({"rope_theta": values.values["rope_theta"], **scaling})
    base = inner.positive("rope_theta")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", 1) != 1:
        raise DataError("partial_rotary_factor is not supported: rotary embedding of whole heads")

    def length() -> int:
        return inner.positive(
            "original_max_position_embeddings", values.values.get("max_position_embeddings", 0)
        )

    if kind == "default":
        return RopeConfig(base=base)
    if kind == "linear":
        return RopeConfig(base=base, linear_factor=inner.positive("factor"))
    if kind == "llama3":
        return RopeConfig(
            base=base,
            llama3=Llama3Config(
                factor=inner.positive("factor"),
                original_length=length(),
                fast_turns=inner.positive("high_freq_factor"),
                slow_turns=inner.positive("low_freq_factor"),
            ),
        )
    if kind == "yarn":
        if scaling.get("truncate", True) is not True:
            raise DataError("truncate=false of YaRN is not supported: corners at whole pairs alone")
        return RopeConfig(base=base, yarn=_yarn(inner, length()))
    raise DataError(f"rope_type {kind!r} is none of default, linear, llama3, yarn")


def _yarn(inner: Source, length: int) -> YarnConfig:
    factor, magnitude = inner.positive("factor"), inner.values.get("attention_factor")
    given = Source({name: x for name, x in inner.values.items() if x is not None})
    scales = [given.number(name, 0) for name in ("mscale", "mscale_all_dim")]
    if magnitude is None and all(scales):
        above, below = (0.1 * x * math.log(factor) + 1 if factor > 1 else 1.0 for x in scales)
        magnitude = above / below
    return YarnConfig(
        factor=factor,
        original_length=length,
        fast_turns=given.positive("beta_fast", 32.0),
        slow_turns=given.positive("beta_slow", 1.0),
        magnitude=magnitude,
    )
