"""SwiGLU: features silu(x W_gate) * (x W_up), output features W_down."""

from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float

from ttcd_jax.config import Positive
from ttcd_jax.nn.block import Dims, LayerState, Names, Output, Sublayer, SublayerConfig, Views
from ttcd_jax.nn.linear import linear, normal_param
from ttcd_jax.nn.row import Hidden, Piece


class MLPConfig(Dims, SublayerConfig):
    """F = `hidden_dim`, for each of `num_streams` residual streams."""

    reference_names: ClassVar[Names] = {
        "gate_proj.weight": ("gate", "linear"),
        "up_proj.weight": ("up", "linear"),
        "down_proj.weight": ("down", "linear"),
    }

    hidden_dim: Positive
    num_streams: Positive = 1

    def unit_flops(self, length: int) -> int | float:
        """One product of a row with a D by F matrix."""
        return 2 * length * self.dim * self.hidden_dim

    def flops(self, length: int) -> int | float:
        return self.num_streams * 3 * self.unit_flops(length)


class SwiGLU(Sublayer, config=MLPConfig):
    """x [B, T, D] -> [B, T, D]; with a student's stream beside it the same of both."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        D, F, std = config.dim, config.hidden_dim, config.init_std
        dtype = config.precision.param_dtype
        self.gate = normal_param(rngs, (D, F), ("embed", "mlp"), std, dtype)
        self.up = normal_param(rngs, (D, F), ("embed", "mlp"), std, dtype)
        self.down = normal_param(rngs, (F, D), ("mlp", "embed"), std, dtype)

    def features(self, x: Hidden) -> Float[Array, "B T F"]:
        dtype = self.config.precision.compute_dtype
        return jax.nn.silu(linear(x, self.gate[...], dtype)) * linear(x, self.up[...], dtype)

    def plain(self, x: Hidden) -> Hidden:
        return linear(self.features(x), self.down[...], self.config.precision.compute_dtype)

    def __call__(self, x: Hidden) -> Hidden:
        return self.plain(x)

    def forward(self, x: Hidden, row: Any, student: Hidden | None = None) -> tuple[Output, Any]:
        y = self.plain(x)
        return (y if student is None else Views(y, self.plain(student))), None

    def extend(
        self, x: Hidden, piece: Piece, state: LayerState, student: Hidden | None = None
    ) -> tuple[Output, LayerState]:
        return self.forward(x, piece, student)
