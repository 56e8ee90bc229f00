"""The model for inference: layers unstacked, matrices in the compute dtype."""

import dataclasses
from typing import Any

from flax import nnx, struct

from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer, layer_slots
from ttcd_jax.sharding.rules import rounded


@struct.dataclass
class InferenceModel:
    """A pytree of arrays, unstacked, so that decoding a token copies no layer's parameters."""

    embedding: nnx.Param
    layers: tuple[Any, ...]  # the parameters of each block
    final_norm: nnx.Param
    head: nnx.Param
    config: TransformerConfig = struct.field(pytree_node=False)
    blocks: tuple[nnx.GraphDef, ...] = struct.field(pytree_node=False)

    @property
    def modules(self) -> list[Any]:
        """The blocks with their parameters."""
        return [*map(nnx.merge, self.blocks, self.layers)]

    def by(self, config: TransformerConfig) -> "InferenceModel":
        """The model of the same parameters by another configuration."""
        return dataclasses.replace(self, config=config, blocks=abstract_model(config).blocks)


def abstract_model(config: TransformerConfig) -> InferenceModel:
    return nnx.eval_shape(lambda: inference_model(Transformer(config, rngs=nnx.Rngs(0))))


def inference_model(model: Transformer) -> InferenceModel:
    """The model with a copy of its parameters: operands of products are rounded to the compute
    dtype, as every product would round them; all others are kept."""
    dtype = model.config.precision.compute_dtype

    def copy_of(weight: nnx.Param, row: int | None = None) -> nnx.Param:
        axes = weight.get_metadata("axes")
        value = weight[...] if row is None else weight[...][row]
        metadata = {"axes": axes[-value.ndim :], "is_operand": weight.get_metadata("is_operand")}
        return nnx.Param(rounded(value, weight, dtype), **metadata)

    graphs, layers = [], []
    for slot in layer_slots(model.config):
        graph, params = nnx.split(getattr(getattr(model, slot.group), slot.block))
        graphs.append(graph)
        layers.append(nnx.map_state(lambda _, x, row=slot.row: copy_of(x, row), params))
    embedding, final_norm = copy_of(model.embedding), copy_of(model.final_norm)
    head = embedding if model.config.has_tied_head else copy_of(model.head)
    return InferenceModel(
        embedding, tuple(layers), final_norm, head, model.config, blocks=tuple(graphs)
    )
