"""The IP-TTT MLP: a SwiGLU whose down projection learns to predict targets from features.

    h = conv_A(feat(x)),  v = conv_T(targets)                  both inside their chunk
    W_i = W_base + eta * sum over earlier chunks of h^T (v P),   y = h W_i

x is the normed hidden state; the targets are x itself or the raw token embeddings. The same memory
as IP-TTCD's with another thing written into it: no error, no key norm, no token rate. A symmetric
target convolution looks ahead inside its chunk and stays causal, because only later chunks read
what a chunk writes; a symmetric activation convolution would not be.
"""

import dataclasses
from typing import Literal

from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.config import Config
from ttcd_jax.layers.memory import (
    ConvInit,
    FastWeightConfig,
    MemoryStats,
    ProjInit,
    init_conv,
    init_proj,
    memory_stats,
)
from ttcd_jax.layers.mlp import MLPConfig, SwiGLU
from ttcd_jax.layers.short_conv import short_conv
from ttcd_jax.ttt.chunking import chunk_segments, from_chunks, memory_mask, to_chunks
from ttcd_jax.ttt.product import weight_product
from ttcd_jax.ttt.scan import apply_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetMemoryConfig(FastWeightConfig):
    """What IP-TTT writes. The defaults are the published ones."""

    target: Literal["embedding", "hidden"] = "hidden"
    has_target_conv: bool = True
    has_activation_conv: bool = False
    is_conv_causal: bool = False  # both convolutions
    conv_init: ConvInit = "zeros"  # both; zero targets write nothing until the taps are trained
    proj_init: ProjInit = "gaussian_diagonal"


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPTTTConfig(Config):
    """An MLP that stores targets in its down projection."""

    mlp: MLPConfig
    memory: TargetMemoryConfig = TargetMemoryConfig()


class IPTTTMLP(SwiGLU):
    """(x, targets) [B, T, D] -> y [B, T, D], any T. Parameters of SwiGLU plus P and the
    convolutions; gradient flows into the targets."""

    def __init__(self, config: IPTTTConfig, *, rngs: nnx.Rngs):
        super().__init__(config.mlp, rngs=rngs)
        memory, mlp = config.memory, config.mlp
        self.memory = memory
        if memory.has_proj:
            dtype = mlp.precision.param_dtype
            self.proj = init_proj(memory.proj_init, rngs, mlp.dim, mlp.init_std, dtype)
        if memory.has_target_conv:
            self.target_conv = self._init_conv(rngs, mlp.dim, "embed")
        if memory.has_activation_conv:
            self.activation_conv = self._init_conv(rngs, mlp.hidden_dim, "mlp")

    def _init_conv(self, rngs: nnx.Rngs, channels: int, axis: str) -> nnx.Param:
        return init_conv(
            self.memory.conv_init,
            rngs,
            (self.memory.num_taps, channels),
            axis,
            is_causal=self.memory.is_conv_causal,
            std=self.config.init_std,
            dtype=self.config.precision.param_dtype,
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        targets: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        return self.forward(x, targets, segment_ids)[0]

    def forward(
        self,
        x: Float[Array, "B T D"],
        targets: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], MemoryStats]:
        """y and what the memory holds. Documents (`segment_ids`) neither share nor leak it."""
        memory, length = self.memory, x.shape[1]
        if not memory.resets_at_document:
            segment_ids = None
        segments = chunk_segments(segment_ids, memory.chunk_size)
        h = to_chunks(self.features(x), memory.chunk_size)
        v = to_chunks(targets.astype(h.dtype), memory.chunk_size)
        causal = memory.is_conv_causal
        if memory.has_activation_conv:
            h = short_conv(h, self.activation_conv[...], is_causal=causal, segment_ids=segments)
        if memory.has_target_conv:
            v = short_conv(v, self.target_conv[...], is_causal=causal, segment_ids=segments)
        if memory.has_proj:
            v = weight_product(v, self.proj[...].astype(v.dtype))
        mask = memory_mask(segment_ids, length, memory.chunk_size)
        rule = memory.rule(self.config.precision)
        y, state = apply_memory(rule, h, h, v, self.down[...].astype(h.dtype), mask)
        return from_chunks(y, length), memory_stats(state, self.down[...], memory.eta)
