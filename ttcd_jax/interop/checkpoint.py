"""Checkpoints of other implementations, a `config.json` and weights: import and export.

An import keeps all that an export needs to reproduce the files: every tensor's dtype, whether a
tied head was stored besides the embedding, and `config.json` byte for byte. Names and layouts are
those of the reference implementation (`SublayerConfig.reference_names`), which a `Format` may
rename. Its linear weights are [out, in], ours [in, out]; its depthwise convolutions [F, 1, R], ours
[R, F]; `ttt_proj` multiplies from the right in both.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax.traverse_util import unflatten_dict

from ttcd_jax.config import differences
from ttcd_jax.errors import CheckpointError, DataError, UserError
from ttcd_jax.files import parse_json, read_json, read_text, sha256
from ttcd_jax.interop.weight_files import WeightFiles, cast, open_weights
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.nn.block import Names
from ttcd_jax.precision import Precision
from ttcd_jax.train.checkpoint import StreamedLeaf
from ttcd_jax.train.layers_on_disk import by_name, misfit, stored_params, unstacked

Params = dict[str, Any]  # nested, arrays at the leaves

CONFIG = "config.json"

_EMBEDDING, _HEAD, _PREFIX = "model.embeddings.weight", "lm_head.weight", "model."
# Fields of our blocks without effect on a document's output: speed (with the chunks of the delta
# rule), initialisation, gradients, document resets. Writers check the eps of q/k norms, which has
# an effect where there are any.
_UNSEEN = {
    "attention_implementation", "block_chunks", "conv_implementation", "conv_init", "folds_state",
    "form", "init_std", "precision", "proj_init", "qk_norm_eps", "resets_at_document",
    "rule.chunk_size", "student_conv_init", "teacher_conv_init", "zero_slope",
}  # fmt: skip
_MODEL_NAMES: Names = {
    _EMBEDDING: ("embedding", "same"),
    "model.norm.weight": ("final_norm", "same"),
    _HEAD: ("head", "same"),
}


class Layout(NamedTuple):
    to_ours: Callable[[Any], Any]
    to_theirs: Callable[[Any], Any]


LAYOUTS = {
    "same": Layout(lambda x: x, lambda x: x),
    "linear": Layout(lambda x: x.mT, lambda x: x.mT),
    "conv": Layout(lambda x: x[:, 0].T, lambda x: x.T[:, None]),
}


class Named(NamedTuple):
    """A parameter by its name in our checkpoints, its shape and dtype there."""

    path: str
    layout: Layout
    leaf: jax.ShapeDtypeStruct


def names_on_disk(config: TransformerConfig) -> dict[str, Named]:
    """Every parameter of the model by its reference name."""
    names = dict(_MODEL_NAMES)
    for layer, block in enumerate(block_configs(config)):
        for name, (path, layout) in block.reference_names.items():
            names[f"model.layers.{layer}.{name}"] = f"layers/{layer}/{path}", layout
    leaves = stored_params(config)  # of those that a layer may have
    return {
        name: Named(path, LAYOUTS[layout], leaves[path])
        for name, (path, layout) in names.items()
        if path in leaves
    }


def model_to_reference(params: Params, config: TransformerConfig) -> dict[str, np.ndarray]:
    """Every parameter of a model under its reference name. Linear, so it maps gradients too."""
    rows, names = unstacked(config, by_name(params)), names_on_disk(config).items()
    return {name: x.layout.to_theirs(np.asarray(rows[x.path])) for name, x in names}


class Format(NamedTuple):
    """What the checkpoints of one implementation mean.

    `model_of(config.json, precision)` is our configuration of the model; `source_of` its inverse,
    which raises `UserError` for a model that the implementation, `title`, cannot express. `unread`
    gives the keys of `config.json` without effect, `renamed` their name of a tensor of the
    reference. Tensors whose names end with one of `dropped` are buffers. `dtype`: of the parameters
    that are read, None the widest of the files. `texts`: small files that are kept.
    """

    name: str
    title: str
    model_of: Callable[[Mapping[str, Any], Precision], TransformerConfig]
    source_of: Callable[[TransformerConfig], dict[str, Any]]
    unread: Callable[[Mapping[str, Any]], list[str]]
    dropped: tuple[str, ...]
    renamed: Callable[[str], str] = lambda name: name
    dtype: np.dtype | None = None
    texts: Sequence[str] = ()


class ImportedModel(NamedTuple):
    """Parameters as a nested dict, the configuration of their model, and metadata of the files
    (ready for JSON: paths, digests, dtypes, dropped tensors, the original configuration)."""

    params: Params
    config: TransformerConfig
    metadata: dict[str, Any]


def open_checkpoint(
    path: Path, form: Format, folder: Path | None = None, weights: WeightFiles | None = None
) -> ImportedModel:
    """The model in a folder with `config.json` and weights, or in a weight file next to one. Its
    parameters are `StreamedLeaf`s by their names on disk: nothing but headers is read yet.

    A second prefix `model.` of all names, as in training checkpoints, is removed. A tied model
    takes the embedding, with a warning for a stored head that differs. Raises `DataError` for a
    file that is missing or damaged and for a model that we do not support, by its key,
    `CheckpointError` for names or shapes that do not fit `config.json`. Of a file `path` that says
    all in another way, `folder` has the small files, and these are the `weights`.
    """
    file = (folder or (path if path.is_dir() else path.parent)) / CONFIG
    files = [path]
    if weights is None:
        weights = _plainly_named(open_weights(path))
        files = [file, *weights.files]
    config_file, source = files[0], read_json(file)
    texts, own = (file.with_name(name) for name in form.texts), source.get("model")
    counts = source.get("num_hidden_layers"), isinstance(own, dict) and own.get("num_layers")
    for layers in counts:
        if isinstance(layers, int) and layers > len(weights):  # before anything is built per layer
            raise CheckpointError(
                f"{config_file} has {layers} layers, the checkpoint {len(weights)} tensors"
            )
    kinds = {tensor.dtype for tensor in weights.stored.values()}
    dtype = form.dtype or functools.reduce(jnp.promote_types, kinds)
    kind: Any = dtype.name
    compute = kind if kind == "bfloat16" else "float32"
    try:
        config = form.model_of(source, Precision(param=kind, compute=compute))
    except UserError as error:
        raise DataError(f"{config_file}: {error}") from error
    dropped = [name for name in weights if name.endswith(form.dropped)]
    is_tied = config.has_tied_head and _HEAD in weights
    used = weights.keys() - {*dropped, *([_HEAD] if is_tied else [])}
    wanted = {form.renamed(name): x for name, x in names_on_disk(config).items()}
    shapes = {name: jax.eval_shape(x.layout.to_theirs, x.leaf) for name, x in wanted.items()}
    if problem := misfit(shapes, {name: weights.stored[name] for name in used}):
        raise CheckpointError(f"{path} is not the model of its configuration: {problem}")
    params = {x.path: _leaf(weights, name, x, dtype) for name, x in wanted.items()}
    metadata = {
        "format": form.name,
        "path": str(path.absolute()),
        "files": {x.name: {"bytes": x.stat().st_size, "sha256": sha256(x)} for x in files},
        "model_type": source["model_type"],
        "num_parameters": sum(math.prod(leaf.shape) for leaf in params.values()),
        "dropped": dropped,
        "tied_head": _tied_head(weights, form.renamed(_EMBEDDING)) if is_tied else None,
        "ignored_keys": form.unread(source),
        "dtypes": {name: tensor.dtype.name for name, tensor in weights.stored.items()},
        "config_json": file.read_bytes().decode(),  # line endings unchanged
        "text_files": {file.name: read_text(file) for file in texts if file.is_file()},
    }
    return ImportedModel(unflatten_dict(params, sep="/"), config, metadata)


def _plainly_named(weights: WeightFiles) -> WeightFiles:
    if not any(name.startswith(_PREFIX + _PREFIX) for name in weights):
        return weights
    stored = {name.removeprefix(_PREFIX): name for name in weights}
    if len(stored) < len(weights):
        twice = next(x for x in weights if stored[x.removeprefix(_PREFIX)] != x)
        file = weights.stored[twice].file
        raise DataError(f"{file}: {twice!r} is there with a prefix and without")
    tensors = {name: weights.stored[x] for name, x in sorted(stored.items())}
    return WeightFiles(tensors, lambda name: weights[stored[name]], weights.files)


def _leaf(weights: WeightFiles, name: str, ours: Named, dtype: np.dtype) -> StreamedLeaf:
    def read() -> np.ndarray:
        return np.ascontiguousarray(ours.layout.to_ours(weights[name]), dtype)

    return StreamedLeaf(ours.leaf.shape, dtype, read)


def _tied_head(weights: WeightFiles, embedding: str) -> str:
    if np.array_equal(weights[_HEAD], weights[embedding]):
        return "equal to the embedding"
    text = "%s differs from the embedding it is tied to: the embedding is used for both"
    logging.warning(text, _HEAD)
    return "differs from the embedding, not used"


def exported(
    params: Params,
    config: TransformerConfig,
    metadata: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    *,
    form: Format,
    **keys: Any,
) -> tuple[dict[str, np.ndarray], str]:
    """(tensors by their names, text of `config.json`) of one of our models.

    With the `metadata` of its import they are those of the import, bit for bit; otherwise float32
    and `form.source_of(config)` with `keys`. `dtype` replaces either. Raises `UserError` for a
    model that the format cannot express, and for a value that `dtype` cannot hold.
    """
    if metadata:
        source = parse_json(metadata["config_json"].encode(), Path(CONFIG))
    else:
        source = form.source_of(config) | keys
        _check_expressed(config, form.model_of(source, config.precision), form.title)
    tensors = {form.renamed(x): y for x, y in model_to_reference(params, config).items()}
    if metadata and metadata["tied_head"]:
        tensors[_HEAD] = tensors[form.renamed(_EMBEDDING)]
    if metadata and dtype is None:
        return cast(tensors, metadata["dtypes"]), metadata["config_json"]
    dtype = dtype or "float32"
    source["dtype" if "dtype" in source else "torch_dtype"] = dtype
    return cast(tensors, dict.fromkeys(tensors, dtype)), as_json(source)


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _check_expressed(ours: TransformerConfig, theirs: TransformerConfig, whose: str) -> None:
    """Raises `UserError` for the first field, of those that the output of a document depends on,
    that differs between a model and what its exported configuration describes."""
    for difference in differences(_seen(theirs), _seen(ours)):
        name, _, values = difference.partition(": ")
        if not any(re.search(rf"\b{re.escape(unseen)}\b", name) for unseen in _UNSEEN):
            possible, _, value = values.partition(" -> ")
            raise UserError(f"{whose} cannot express {name} {value} of this model, only {possible}")


def _seen(config: TransformerConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in ("vocab_size", "norm_eps", "has_tied_head")}
    blocks = enumerate(block_configs(config))
    return fields | {f"layer {layer}": block.to_dict() for layer, block in blocks}
