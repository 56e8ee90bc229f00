"""Grouped-query attention under one causal sliding window (`window=None`: full attention)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels import window_attention
from ttcd_kernels.dual_window.api import Implementation

from ttcd_jax.axes import param
from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.nn.cache import KVCache, cached_attention, empty_cache
from ttcd_jax.nn.linear import linear, normal_param
from ttcd_jax.nn.norm import rms_norm
from ttcd_jax.nn.rope import RopeConfig, rotate
from ttcd_jax.nn.stream import Piece
from ttcd_jax.precision import Precision
from ttcd_jax.sharding.attention import over_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Windows count the query itself. `qk_norm_eps` is 1e-6 in Hugging Face's Qwen3 and 1e-5 in the
    reference implementation, whatever its other norms use."""

    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rope: RopeConfig = RopeConfig()
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    qk_norm_eps: float = 1e-6
    init_std: float = 0.02
    implementation: Implementation = "auto"
    precision: Precision = Precision()

    def validate(self) -> None:
        for name in ("dim", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"AttentionConfig.{name} {getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs")
        if self.window is not None and self.window < 1:
            raise UserError(f"window {self.window} must be at least 1 (it counts the query itself)")


class Attention(nnx.Module):
    """h [B, T, D] -> [B, T, D]: projections, optional q/k norm, rotary, window attention,
    output."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, H = config.dim, config.head_dim
        wide, narrow = config.num_heads * H, config.num_kv_heads * H
        std, dtype = config.init_std, config.precision.param_dtype
        self.query = normal_param(rngs, (D, wide), ("embed", "heads"), std, dtype)
        self.key = normal_param(rngs, (D, narrow), ("embed", "kv_heads"), std, dtype)
        self.value = normal_param(rngs, (D, narrow), ("embed", "kv_heads"), std, dtype)
        self.out = normal_param(rngs, (wide, D), ("heads", "embed"), std, dtype)
        if config.has_qkv_bias:
            self.query_bias = param(jnp.zeros((wide,), dtype), ("heads",))
            self.key_bias = param(jnp.zeros((narrow,), dtype), ("kv_heads",))
            self.value_bias = param(jnp.zeros((narrow,), dtype), ("kv_heads",))
        if config.has_qk_norm:
            self.query_norm = param(jnp.ones((H,), dtype), ("head_dim",))
            self.key_norm = param(jnp.ones((H,), dtype), ("head_dim",))

    def project(
        self, h: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Rotated q and k, and v."""
        config, dtype = self.config, self.config.precision.compute_dtype
        heads = (*h.shape[:2], -1, config.head_dim)
        q, k, v = (linear(h, w[...], dtype) for w in (self.query, self.key, self.value))
        if config.has_qkv_bias:
            biases = (self.query_bias, self.key_bias, self.value_bias)
            q, k, v = (x + b[...].astype(dtype) for x, b in zip((q, k, v), biases, strict=True))
        q, k, v = (x.reshape(heads) for x in (q, k, v))
        if config.has_qk_norm:
            q = rms_norm(q, self.query_norm[...], config.qk_norm_eps)
            k = rms_norm(k, self.key_norm[...], config.qk_norm_eps)
        return rotate(q, positions, config.rope), rotate(k, positions, config.rope), v

    def project_out(self, heads: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        flat = heads.reshape(*heads.shape[:2], -1)
        return linear(flat, self.out[...], self.config.precision.compute_dtype)

    def __call__(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        q, k, v = self.project(h, positions)
        return self.project_out(attend(self.config, q, k, v, segment_ids))

    def start(self, batch_size: int, max_length: int | None) -> KVCache:
        """What `extend` finds in front of a row; `max_length` bounds rows of full attention."""
        return start_cache(self.config, batch_size, max_length)

    def extend(
        self, h: Float[Array, "B T D"], piece: Piece, cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """The same for a piece of a row: (output, the cache behind it)."""
        q, k, v = self.project(h, piece.positions(h.shape[1]))
        heads, cache = attend_cached(self.config, q, k, v, piece, cache)
        return self.project_out(heads), cache


def attend(
    config: AttentionConfig,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
) -> Float[Array, "B T N H"]:
    """Attention under the configuration's one window."""

    def window(q, k, v, segment_ids):
        return window_attention(
            q,
            k,
            v,
            window=config.window,
            segment_ids=segment_ids,
            implementation=config.implementation,
        )

    return over_parts(window, q, k, v, segment_ids, config.window, num_outputs=1)


def start_cache(config: AttentionConfig, batch_size: int, max_length: int | None) -> KVCache:
    """An empty cache of what the configuration's window reaches."""
    slots = max_length if config.window is None else config.window
    heads = config.num_kv_heads, config.head_dim
    return empty_cache(batch_size, slots, *heads, config.precision.compute_dtype)


def attend_cached(
    config: AttentionConfig,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    piece: Piece,
    cache: KVCache,
) -> tuple[Float[Array, "B T N H"], KVCache]:
    """`attend` for a piece of a row: (output, the cache behind it)."""
    _, seen, cache = cached_attention(
        *(q, k, v, piece, cache),
        window=config.window,
        student_window=config.window,
        implementation=config.implementation,
    )
    return seen, cache


def row_positions(tokens_or_hidden: jax.Array) -> Int[Array, "B T"]:
    """0 .. T-1 for every row."""
    B, T = tokens_or_hidden.shape[:2]
    return jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
