"""Checkpoints of the reference implementation (`config.json` and weights): import and export.

An import keeps all that an export needs to reproduce the files: every tensor's dtype, whether a
tied head was stored besides the embedding, and `config.json` byte for byte.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from ttcd_jax.errors import CheckpointError, DataError, UserError
from ttcd_jax.files import parse_json, read_json, sha256
from ttcd_jax.interop.expressed import check_expressed
from ttcd_jax.interop.reference import (
    Params,
    model_from_reference,
    model_to_reference,
    reference_shapes,
)
from ttcd_jax.interop.reference_config import reference_config, transformer_config, unread_keys
from ttcd_jax.interop.weight_files import WeightFiles, cast, open_weights
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.train.layers_on_disk import misfit

CONFIG = "config.json"
EMBEDDING, HEAD = "model.embeddings.weight", "lm_head.weight"

_PREFIX = "model."
# Buffers stored by old runs; the configuration determines both.
_DROPPED = (".ttt_lr", "inv_freq")


class Imported(NamedTuple):
    """Float32 parameters, their configuration, and the metadata of the files (for JSON: paths,
    digests, dtypes, dropped tensors, the original configuration)."""

    params: Params
    config: TransformerConfig
    metadata: dict[str, Any]


def import_reference(path: Path) -> Imported:
    """The model in a folder with `config.json` and weights, or in a weight file next to one.

    A second prefix `model.` of all names, as in training checkpoints, is removed; `*.ttt_lr` and
    `*inv_freq` are dropped; a tied model takes the embedding, with a warning for a stored head that
    differs. Raises `DataError` for a file that is missing, damaged, or of an unsupported model,
    `CheckpointError` for names or shapes that do not fit the configuration.
    """
    config_file = (path if path.is_dir() else path.parent) / CONFIG
    source = read_json(config_file)
    weights = open_weights(path)
    names = _our_names(weights)
    dropped = sorted(name for name in names if name.endswith(_DROPPED))
    config = _configuration(config_file, source, num_tensors=len(names))
    ignored = {*dropped, HEAD} if config.has_tied_head else {*dropped}
    used = {name: stored for name, stored in names.items() if name not in ignored}
    shapes = reference_shapes(config).items()
    wanted = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes}
    if problem := misfit(wanted, {name: weights.stored[stored] for name, stored in used.items()}):
        raise CheckpointError(f"{path} is not the model of its {CONFIG}: {problem}")
    tensors = {name: weights[stored].astype(np.float32) for name, stored in used.items()}
    head = None
    if config.has_tied_head and HEAD in names:
        head = _compare_head(weights, names[HEAD], tensors[EMBEDDING])
    metadata = {
        "format": "reference",
        "path": str(path.absolute()),
        "files": {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}
            for file in (config_file, *weights.files)
        },
        "model_type": source["model_type"],
        "num_parameters": sum(tensor.size for tensor in tensors.values()),
        "has_prefix": any(name != stored for name, stored in names.items()),
        "dropped": dropped,
        "tied_head": head,
        "ignored_keys": unread_keys(source),
        "dtypes": {name: weights.stored[names[name]].dtype.name for name in sorted(names)},
        "config_json": config_file.read_bytes().decode(),  # line endings unchanged
    }
    params = jax.tree.map(jax.numpy.asarray, model_from_reference(tensors, config))
    return Imported(params, config, metadata)


def _our_names(weights: WeightFiles) -> dict[str, str]:
    """Name -> the name in the file, which may have one more prefix."""
    if not any(name.startswith(_PREFIX + _PREFIX) for name in weights):
        return {name: name for name in weights}
    names: dict[str, str] = {}
    for stored in weights:
        name = stored.removeprefix(_PREFIX)
        if name in names:
            raise DataError(
                f"{weights.stored[stored].file}: {names[name]!r} and {stored!r} are the same tensor"
            )
        names[name] = stored
    return names


def _configuration(
    config_file: Path, source: Mapping[str, Any], num_tensors: int
) -> TransformerConfig:
    layers = source.get("num_hidden_layers")
    if isinstance(layers, int) and layers > num_tensors:  # before anything is built per layer
        raise CheckpointError(
            f"{config_file} has {layers} layers, the checkpoint {num_tensors} tensors"
        )
    try:
        return transformer_config(source)
    except UserError as error:
        raise DataError(f"{config_file}: {error}") from error


def _compare_head(weights: WeightFiles, stored: str, embedding: np.ndarray) -> str:
    if np.array_equal(weights[stored], embedding):
        return "equal to the embedding"
    logging.warning(
        "%s differs from the embedding it is tied to: the embedding is used for both", stored
    )
    return "differs from the embedding, not used"


def export_reference(
    params: Params,
    config: TransformerConfig,
    metadata: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> tuple[dict[str, np.ndarray], str]:
    """(tensors by their reference name, text of `config.json`) of one of our models.

    With the `metadata` of its import, tensors and configuration are those of the import, bit for
    bit; otherwise float32. `dtype` replaces either. Raises `UserError` for a model that the
    reference cannot express and for a value outside `dtype`.
    """
    tensors = model_to_reference(params, config)
    if metadata is None:
        name = dtype or "float32"
        source = _expressed(config) | {"torch_dtype": name}
        return cast(tensors, dict.fromkeys(tensors, name)), json.dumps(source, indent=2) + "\n"
    text = metadata["config_json"]
    if metadata["tied_head"]:
        tensors[HEAD] = tensors[EMBEDDING]
    if dtype is None:
        return cast(tensors, metadata["dtypes"]), text
    source = parse_json(text.encode(), Path(CONFIG))
    key = "dtype" if "dtype" in source else "torch_dtype"
    text = json.dumps(source | {key: dtype}, indent=2) + "\n"
    return cast(tensors, dict.fromkeys(tensors, dtype)), text


def _expressed(config: TransformerConfig) -> dict[str, Any]:
    """`config.json` of a model, provided that reading it gives the same model."""
    source = reference_config(config)
    check_expressed(config, transformer_config(source), "the reference implementation")
    return source
