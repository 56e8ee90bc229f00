"""The training state: a dict of arrays, made from a configuration and a seed, nothing else."""

from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ttcd_jax.models.catalog import TransformerConfig
from ttcd_jax.models.transformer import Transformer


class TrainState(TypedDict):
    """`params` as a nested dict of arrays, the optimizer's state, and how many steps were taken."""

    params: dict[str, Any]
    opt_state: optax.OptState
    step: jax.Array


def abstract_model(config: TransformerConfig) -> Transformer:
    """The model with `jax.ShapeDtypeStruct`s for parameters."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def logical_axes(config: TransformerConfig) -> dict[str, Any]:
    """The axis names of every parameter (`ttcd_jax.axes`), in a dict nested like `params`."""
    params = nnx.state(abstract_model(config), nnx.Param)
    names = jax.tree.map(
        lambda variable: variable.get_metadata("axes"),
        params,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    return nnx.to_pure_dict(names)


def with_params(config: TransformerConfig, params: dict[str, Any]) -> Transformer:
    """The model holding `params` (arrays or tracers)."""
    graph, state = nnx.split(abstract_model(config))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def init_state(
    config: TransformerConfig, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """A fresh state; call it under `jax.jit` or `jax.eval_shape`."""
    model = Transformer(config, rngs=nnx.Rngs(seed))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return TrainState(
        params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32)
    )
