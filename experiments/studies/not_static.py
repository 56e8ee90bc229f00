"""IP-TTCD that writes only what is not static: errors less a slow map of the student's features.

    python -m experiments.study --import=experiments.studies.not_static --gin=study/not_static.gin

    e = sigmoid(t . b) * ((z_target - z_student) W_base P - feat(t) A),   A [F, D] from zero

Method `ipttcd_less_map` trains A with the rest, by the loss of the model; `ipttcd_less_fit` by
least squares to the first term alone, so that what is left is what A cannot predict. With equal
windows and no convolutions that term is zero, and so is a fitted A. `ipttcd_map` has no first
term, whatever the windows.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ttcd_jax.axes import param
from ttcd_jax.errors import UserError
from ttcd_jax.memory.prefix import Writes
from ttcd_jax.methods.ipttcd import (
    IPTTCDMLP,
    Convolved,
    IPTTCDConfig,
    MemoryConfig,
    dual_window_block,
)
from ttcd_jax.methods.registry import Method, register
from ttcd_jax.nn.linear import weight_product


class LessMapConfig(IPTTCDConfig):
    def flops(self, length: int) -> int | float:
        return super().flops(length) + self.mlp.unit_flops(length)


class LessFitConfig(LessMapConfig):
    pass


class MapConfig(LessMapConfig):
    pass


@jax.custom_vjp
def residual(x: jax.Array, predicted: jax.Array) -> jax.Array:
    """x - predicted. The gradient of `predicted` is that of the squares of the difference, half
    their mean over tokens, not that of the loss."""
    return x - predicted


def _residual_forward(x: jax.Array, predicted: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x - predicted, x - predicted


def _residual_backward(left: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent, -left * (left.shape[-1] / left.size)


residual.defvjp(_residual_forward, _residual_backward)


class LessMapMLP(IPTTCDMLP, config=LessMapConfig):
    """`IPTTCDMLP` with A."""

    is_fitted: ClassVar[bool] = False
    has_difference: ClassVar[bool] = True

    def __init__(self, config: IPTTCDConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        mlp, settings = config.mlp, config.memory
        if not settings.has_token_rate or settings.normalizes_errors:
            raise UserError(
                "a map is subtracted under the gate, from errors of any norm: set "
                "has_token_rate=True and normalizes_errors=False"
            )
        zeros = jnp.zeros((mlp.hidden_dim, mlp.dim), mlp.precision.param_dtype)
        self.static = param(zeros, ("mlp", "embed"))

    def operands(self, convolved: Convolved) -> tuple[Float[Array, "B C L F"], Writes]:
        ungated = convolved[0]._replace(beta=None)
        reads, writes = super().operands((ungated, *convolved[1:]))
        beta, student = convolved[0].beta, convolved[0].student
        assert beta is not None
        if self.is_fitted:
            student = jax.lax.stop_gradient(student)
        predicted = weight_product(student, self.static[...].astype(student.dtype))
        less = residual if self.is_fitted else jnp.subtract
        difference = writes.errors if self.has_difference else jnp.zeros_like(predicted)
        errors = less(difference, predicted) * beta[..., None]
        rate = beta if self.settings.corrects_errors else None
        return reads, writes._replace(errors=errors, rate=rate)


class LessFitMLP(LessMapMLP, config=LessFitConfig):
    is_fitted: ClassVar[bool] = True


class MapMLP(LessMapMLP, config=MapConfig):
    has_difference: ClassVar[bool] = False


for name, label, config in (
    ("ipttcd_less_map", "IP-TTCD less a map", LessMapConfig),
    ("ipttcd_less_fit", "IP-TTCD less a fit", LessFitConfig),
    ("ipttcd_map", "a map alone", MapConfig),
):
    block = functools.partial(dual_window_block, config)
    register(Method(name, label, block, settings=MemoryConfig))
