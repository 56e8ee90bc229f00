"""Weight matrices in [in, out] layout, their initialization and product; RMS normalization."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ttcd_jax.axes import param
from ttcd_jax.nn.product import weight_product


def normal_param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    std: float,
    dtype: DTypeLike,
    *,
    is_operand: bool | None = None,
) -> nnx.Param:
    value = std * jax.random.normal(rngs.params(), shape, dtype)
    return param(value, axes, is_operand=is_operand)


def linear(
    x: Float[Array, "*batch X"], kernel: Float[Array, "X Z"], dtype: DTypeLike
) -> Float[Array, "*batch Z"]:
    """x kernel, operands and result in `dtype`."""
    return weight_product(x.astype(dtype), kernel.astype(dtype))


def rms_norm(
    x: Float[Array, "*batch X"], weight: Float[Array, " X"], eps: float
) -> Float[Array, "*batch X"]:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis. Computed in float32 or better whatever
    the dtype of x (a bfloat16 mean of squares loses two digits), returned in the dtype of x."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(wide.dtype)).astype(x.dtype)


def length(x: Float[Array, "..."], axis: int | tuple[int, ...]) -> Float[Array, "..."]:
    """|x| over `axis`, kept with size 1; its derivative at a zero vector is taken as 0."""
    square = jnp.sum(x * x, axis=axis, keepdims=True)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
