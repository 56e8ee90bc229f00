"""The training state: a dict of arrays, made from a configuration and a seed alone."""

import functools
import math
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int

from ttcd_jax.errors import UserError
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.sharding.rules import replicated, shardings
from ttcd_jax.train.bad_steps import Skips

# One value for every parameter, in dicts nested as the modules are.
Params = dict[str, Any]


class TrainState(TypedDict):
    """The parameters, arrays; the optimizer's state, how many steps were taken, and
    the counts of bad steps in a run that skips them."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]
    skips: NotRequired[Skips]


def abstract_model(config: TransformerConfig) -> Transformer:
    """The model with `jax.ShapeDtypeStruct`s for parameters."""
    graph, state = _split(config, jax.config.read("jax_enable_x64"))
    return nnx.merge(graph, state, copy=True)


@functools.lru_cache
def _split(config: TransformerConfig, is_x64: bool) -> tuple[Any, Any]:
    """(graph, state) of the abstract model, traced once for all that a run asks of it. Its arrays
    have no sharding, in whichever mesh they were traced first."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    return graph, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def abstract_params(config: TransformerConfig) -> Params:
    return nnx.to_pure_dict(nnx.state(abstract_model(config), nnx.Param))


def num_params(config: TransformerConfig) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(config)))


def logical_axes(config: TransformerConfig) -> Params:
    """The axis names of every parameter (`ttcd_jax.axes`)."""
    params = nnx.state(abstract_model(config), nnx.Param)
    return nnx.to_pure_dict(nnx.map_state(lambda _, x: x.get_metadata("axes"), params))


def params_shardings(config: TransformerConfig, mesh: Mesh | AbstractMesh) -> Params:
    """The sharding of every parameter on `mesh`. Raises `UserError` for a dimension that does not
    divide among its devices."""
    return shardings(mesh, logical_axes(config), abstract_params(config))


def state_shardings(
    config: TransformerConfig, optimizer: optax.GradientTransformation, mesh: Mesh | AbstractMesh
) -> Params:
    """The shardings of the training state, in its structure: an optimizer's array of a parameter is
    sharded like that parameter, all else is replicated. Raises `UserError` for such an array of
    another shape."""
    params, arrays = params_shardings(config, mesh), abstract_params(config)
    whole = replicated(mesh)

    def placed(leaf: Any, where: Any, param: Any) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        if leaf.shape != param.shape:
            raise UserError(
                f"the optimizer keeps an array {[*leaf.shape]} for a parameter {[*param.shape]}, "
                "and both are sharded and stored alike: choose one whose arrays have the "
                "parameters' shapes, as AdamW's; factored moments have not"
            )
        return where

    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        placed,
        jax.eval_shape(optimizer.init, arrays),
        params,
        arrays,
        transform_non_params=lambda _: whole,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    return {"params": params, "opt_state": opt_state, "step": whole}


def placed_as(arrays: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arrays, shardings
    )


def with_params(config: TransformerConfig, params: Params) -> Transformer:
    """The model holding `params` (arrays or tracers)."""
    graph, state = nnx.split(abstract_model(config))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def init_params(config: TransformerConfig, seed: int) -> Params:
    """Fresh parameters; call it under `jax.jit` or `jax.eval_shape`."""
    return nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(seed)), nnx.Param))


def state_of(optimizer: optax.GradientTransformation, params: Params) -> TrainState:
    """The state before the first step, with `params`."""
    return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.int32(0))
