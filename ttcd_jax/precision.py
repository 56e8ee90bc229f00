"""The dtypes of parameters, matrix products and running state."""

from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from ttcd_jax.config import Config

FloatName = Literal["float64", "float32", "bfloat16", "float16"]


class Precision(Config):
    """The dtypes `param` of weights and optimizer moments, `compute` of the operands of products,
    `state` of what memories sum, their products, decays and states. Softmax statistics are float32,
    or wider where queries are."""

    param: FloatName = "float32"
    compute: FloatName = "float32"
    state: FloatName = "float32"

    @property
    def param_dtype(self) -> DTypeLike:
        return jnp.dtype(self.param)

    @property
    def compute_dtype(self) -> DTypeLike:
        return jnp.dtype(self.compute)

    @property
    def state_dtype(self) -> DTypeLike:
        return jnp.dtype(self.state)
