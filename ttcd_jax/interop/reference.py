"""Conversion between the parameter names and layouts of the reference implementation and ours.

Its linear weights are [out, in], ours [in, out]; its depthwise convolutions [F, 1, R], ours [R, F];
`ttt_proj` multiplies from the right in both (e P) and is not transposed. Every layer has its own
names (`SublayerConfig.reference_names`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.nn.block import Names
from ttcd_jax.train.layers_on_disk import by_name, stored_params, unstacked

Params = dict[str, Any]  # nested, arrays at the leaves

_MODEL_NAMES: Names = {
    "model.embeddings.weight": ("embedding", "same"),
    "model.norm.weight": ("final_norm", "same"),
    "lm_head.weight": ("head", "same"),
}


class Layout(NamedTuple):
    """The two directions of a tensor's conversion."""

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
    rows = unstacked(config, by_name(params))
    names = names_on_disk(config).items()
    return {name: x.layout.to_theirs(np.asarray(rows[x.path])) for name, x in names}
