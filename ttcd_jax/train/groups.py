"""Parameters that a run treats apart, by their names on disk: separate learning rates, frozen
parameters, and parameters that scale a memory's writes."""

import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ttcd_jax.errors import UserError
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.train.layers_on_disk import matching, per_parameter, stored_params
from ttcd_jax.train.optimizer import Rates
from ttcd_jax.train.state import Params
from ttcd_jax.train.step import Prepare


def rate_factors(config: TransformerConfig, rates: Rates) -> Params | None:
    """The factor of every parameter's learning rate (see `per_parameter`); None if all are 1.
    Raises `UserError` for a pattern that names nothing, and if nothing is left to train."""
    if not rates:
        return None
    names = stored_params(config)
    for pattern, _ in rates:
        matching(pattern, "OptimizerConfig.rates", names, "the model")

    def factor(name: str) -> float:
        return next((x for pattern, x in rates if fnmatch.fnmatchcase(name, pattern)), 1.0)

    firsts = [next((p for p, _ in rates if fnmatch.fnmatchcase(x, p)), None) for x in names]
    if unused := [pattern for pattern, _ in rates if pattern not in firsts]:
        raise UserError(
            f"OptimizerConfig.rates {rates}: all that {unused[0]!r} names, patterns before it name "
            "too, and the first one counts: put it first"
        )
    if not any(map(factor, names)):
        raise UserError(f"OptimizerConfig.rates {rates} freezes every parameter: leave some out")
    return per_parameter(config, factor)


def preparation(
    config: TransformerConfig, factors: Params | None, memory_warmup: int = 0
) -> Prepare:
    """The parameters that the loss of step s is computed with: frozen ones, of `rate_factors` 0,
    are constants. With `memory_warmup` n every memory writes the share min(1, s / n): the parameter
    P in which its writes are linear is multiplied by it, and so is P's gradient, as by a rate eta
    that grows. Raises `UserError` for a model whose memories have no such parameter."""
    blocks = enumerate(block_configs(config) if memory_warmup else ())
    scaled = {f"layers/{layer}/{x.write_param}" for layer, x in blocks if x.write_param}
    if memory_warmup and not scaled:
        raise UserError(
            f"RunConfig.memory_warmup {memory_warmup}: method {config.method!r} with these "
            "settings has no parameter P in which its writes are linear; set it to 0"
        )
    is_scaled = per_parameter(config, lambda name: float(name in scaled))

    def prepare(params: Params, step: Int[Array, ""]) -> Params:
        if factors is not None:
            params = jax.tree.map(_hold, params, factors)
        if memory_warmup:
            share = jnp.minimum(step / memory_warmup, 1)
            params = jax.tree.map(
                lambda x, by: (x * share).astype(x.dtype) if np.any(by) else x, params, is_scaled
            )
        return params

    return prepare


def _hold(leaf: jax.Array, factor: float | np.ndarray) -> jax.Array:
    if np.all(factor):
        return leaf
    still = jax.lax.stop_gradient(leaf)
    return jnp.where(factor != 0, leaf, still) if np.any(factor) else still
