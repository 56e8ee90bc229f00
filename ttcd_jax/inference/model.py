"""A model as inference takes it: layer by layer, matrices in the compute dtype."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer, place_of_layer
from ttcd_jax.sharding.rules import rounded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InferenceModel:
    """A pytree of arrays. Training stacks the parameters of equal layers; here every layer's lie by
    themselves, so that the step of one token copies none of them."""

    embedding: nnx.Param
    layers: tuple[Any, ...]  # the parameters of each block
    final_norm: nnx.Param
    head: nnx.Param
    config: TransformerConfig = dataclasses.field(metadata={"static": True})
    blocks: tuple[nnx.GraphDef, ...] = dataclasses.field(metadata={"static": True})


def inference_model(model: Transformer) -> InferenceModel:
    """The parameters of `model`, copied: matrices rounded to the compute dtype, which is what every
    product does with them first; all others as they are."""
    dtype = model.config.precision.compute_dtype

    def own(weight: nnx.Param, row: int | None = None) -> nnx.Param:
        axes = weight.get_metadata("axes")
        value = weight[...] if row is None else weight[...][row]
        metadata = {"axes": axes[-value.ndim :], "is_operand": weight.get_metadata("is_operand")}
        return nnx.Param(rounded(value, weight, dtype), **metadata)

    graphs, layers = [], []
    for layer in range(model.config.num_layers):
        place = place_of_layer(model.config, layer)
        graph, params = nnx.split(getattr(getattr(model, place.group), place.block))
        graphs.append(graph)
        layers.append(
            jax.tree.map(
                lambda weight, row=place.row: own(weight, row),
                params,
                is_leaf=lambda x: isinstance(x, nnx.Variable),
            )
        )
    embedding = own(model.embedding)
    return InferenceModel(
        embedding,
        tuple(layers),
        own(model.final_norm),
        embedding if model.config.has_tied_head else own(model.head),
        model.config,
        tuple(graphs),
    )
