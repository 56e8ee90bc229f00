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

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels.short_conv.xla import short_conv

from ttcd_jax.config import Config
from ttcd_jax.memory import prefix as scan
from ttcd_jax.memory.chunks import chunk_segments, to_chunks
from ttcd_jax.methods.in_place import (
    ConvInit,
    FastWeightConfig,
    MemoryMLP,
    ProjInit,
    Remembered,
    look_ahead,
    reads_ahead,
)
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.nn.product import weight_product
from ttcd_jax.sharding.memory import apply_memory


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


class IPTTTMLP(MemoryMLP):
    """(x, targets) [B, T, D] -> y [B, T, D], any T. Parameters of SwiGLU plus P and the
    convolutions; gradient flows into the targets."""

    memory: TargetMemoryConfig

    def __init__(self, config: IPTTTConfig, *, rngs: nnx.Rngs):
        memory = config.memory
        super().__init__(config.mlp, memory, rngs=rngs)
        if memory.has_proj:
            self.proj = self._init_proj(memory, rngs)
        if memory.has_target_conv:
            self.target_conv = self._init_conv(memory, memory.conv_init, rngs, "embed")
        if memory.has_activation_conv:
            self.activation_conv = self._init_conv(memory, memory.conv_init, rngs, "mlp")

    def _remember(self, x, targets, segments, segment_ids) -> Remembered:
        size = self.memory.chunk_size
        tokens = tuple(to_chunks(x, size) for x in self._tokens(x, targets))
        h, (keys, v) = self._operands(self._convolved(tokens, segments))
        rule = self.memory.rule(self.config.precision)
        w_base = self.down[...].astype(h.dtype)
        return Remembered(*apply_memory(rule, h, keys, v, w_base, segment_ids, x.shape[1]))

    def _tokens(self, x, targets):
        h = self.features(x)
        return h, targets.astype(h.dtype)

    def _convolved(self, tokens, segments):
        (h, v), causal = tokens, self.memory.is_conv_causal
        if self.memory.has_activation_conv:
            h = self._activation_convolved(h, segments)
        if self.memory.has_target_conv:
            v = short_conv(v, self.target_conv[...], is_causal=causal, segment_ids=segments)
        return h, v

    def _operands(self, convolved):
        h, v = convolved
        if self.memory.has_proj:
            v = weight_product(v, self.proj[...].astype(v.dtype))
        return h, (h, v)

    def _chunked(self, batch_size: int):
        precision = self.config.precision
        w_base = self.down[...].astype(precision.compute_dtype)
        start = jnp.zeros((batch_size, *w_base.shape), precision.state_dtype)
        return scan.chunked_memory(self.memory.rule(precision), w_base), start

    @property
    def _look_back(self) -> int:
        memory = self.memory
        return memory.num_taps - 1 if memory.has_target_conv or memory.has_activation_conv else 0

    @property
    def _look_ahead(self) -> int:
        return look_ahead(self.memory) if self.memory.has_target_conv else 0

    def _check_causal(self) -> None:
        if self.memory.has_activation_conv and look_ahead(self.memory):
            raise reads_ahead("TargetMemoryConfig", "has_activation_conv")

    def keys(
        self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B C L F"]:
        """What `forward` writes under, padding included."""
        h = to_chunks(self.features(x), self.memory.chunk_size)
        if not self.memory.has_activation_conv:
            return h
        return self._activation_convolved(h, chunk_segments(segment_ids, self.memory.chunk_size))

    def _activation_convolved(self, h, segments):
        causal, taps = self.memory.is_conv_causal, self.activation_conv[...]
        return short_conv(h, taps, is_causal=causal, segment_ids=segments)
