"""Weight matrices in [in, out] layout: their initialization and their product."""

import jax
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
