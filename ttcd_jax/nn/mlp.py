"""SwiGLU: features silu(x W_gate) * (x W_up), output features W_down."""

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array, Float

from ttcd_jax.config import Config
from ttcd_jax.nn.linear import linear, normal_param
from ttcd_jax.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig(Config):
    dim: int
    hidden_dim: int
    init_std: float = 0.02
    precision: Precision = Precision()


class SwiGLU(nnx.Module):
    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, F, std = config.dim, config.hidden_dim, config.init_std
        dtype = config.precision.param_dtype
        self.gate = normal_param(rngs, (D, F), ("embed", "mlp"), std, dtype)
        self.up = normal_param(rngs, (D, F), ("embed", "mlp"), std, dtype)
        self.down = normal_param(rngs, (F, D), ("mlp", "embed"), std, dtype)

    def features(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        dtype = self.config.precision.compute_dtype
        return jax.nn.silu(linear(x, self.gate[...], dtype)) * linear(x, self.up[...], dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return linear(self.features(x), self.down[...], self.config.precision.compute_dtype)
