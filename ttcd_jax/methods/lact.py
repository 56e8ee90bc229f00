"""LaCT: window attention and a SwiGLU memory that learns in large chunks, on one q/k/v projection.

    q, k, v = h W_qkv
    y = (attention(q, k, v) + silu(h W_s) * RMSNorm(f(fast q))) W_out          (scale per fast head)

f is the memory of `ttt.fast_swiglu`, read by fast q and written with fast k and v: q and k under a
scale and an offset per channel, SiLU, unit length per fast head, rotary in the attention's head
layout. Published as "Test-Time Training Done Right" (Zhang et al. 2025), its language model form.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.axes import param
from ttcd_jax.config import Config, Positive, PositiveFloat
from ttcd_jax.errors import UserError
from ttcd_jax.memory.chunks import from_chunks, to_chunks
from ttcd_jax.memory.fast_swiglu import (
    FastInputs,
    FastRule,
    FastWeights,
    chunked_memory,
    fresh_state,
    unit,
)
from ttcd_jax.nn.attention import AttentionConfig, attend, attend_cached, start_cache
from ttcd_jax.nn.cache import KVCache
from ttcd_jax.nn.linear import linear, normal_param
from ttcd_jax.nn.norm import rms_norm
from ttcd_jax.nn.product import product
from ttcd_jax.nn.rope import rotate
from ttcd_jax.nn.stream import Piece, Streamed, continued
from ttcd_jax.sharding.recurrent import lact_memory

NORM_EPS = 1e-5
# A learning rate is softplus(. + this): 0.001 where the projection says nothing.
RATE_SHIFT = 0.001 + math.log(-math.expm1(-0.001))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaCTMemoryConfig(Config):
    """The switches of the method, as published but for `resets_at_document`."""

    num_fast_heads: Positive = 4
    hidden_expansion: PositiveFloat = 1  # hidden size of a fast head over its width, rounded down
    chunk_size: Positive = 2048
    low_rank: Positive | None = 32  # w0, w2 start as such a product plus 0.5 I; None: full matrices
    has_momentum: bool = True
    orthogonalizes_updates: bool = False  # Newton-Schulz on every step, in precision.state
    keeps_raw_state: bool = False  # steps add to weights that are normalised for reading only
    has_qk_silu: bool = True
    has_value_silu: bool = True  # only together with has_qk_silu
    has_scale: bool = True
    has_rope: bool = True  # in the memory; the attention always has it
    has_qk_norm: bool = False  # over the whole width, for attention and memory
    has_qkv_bias: bool = False
    resets_at_document: bool = True  # published: the memory leaks from document to document


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaCTConfig(Config):
    """`attention` gives width, heads, window, rotary, start and precision."""

    attention: AttentionConfig
    memory: LaCTMemoryConfig = LaCTMemoryConfig()

    def validate(self) -> None:
        attention, N = self.attention, self.memory.num_fast_heads
        if attention.num_kv_heads != attention.num_heads:
            raise UserError(
                f"LaCT shares its keys with the memory: num_kv_heads {attention.num_kv_heads} must "
                f"be num_heads {attention.num_heads}"
            )
        if attention.num_heads * attention.head_dim != attention.dim:
            raise UserError(
                f"LaCT needs heads that fill the width: num_heads {attention.num_heads} times "
                f"head_dim {attention.head_dim} must be dim {attention.dim}"
            )
        for name in ("has_qk_norm", "has_qkv_bias"):
            if getattr(attention, name):
                raise UserError(
                    f"attention.{name} is for projections of its own; LaCT shares one with the "
                    f"memory: set memory.{name}"
                )
        if attention.dim % N:
            raise UserError(f"num_fast_heads {N} does not divide dim {attention.dim}")
        if self.fast_hidden < 1:
            raise UserError(
                f"hidden_expansion {self.memory.hidden_expansion} leaves nothing of a fast head of "
                f"width {self.fast_width}: raise it"
            )

    @property
    def fast_width(self) -> int:
        """H of the memory."""
        return self.attention.dim // self.memory.num_fast_heads

    @property
    def fast_hidden(self) -> int:
        """F of the memory."""
        return int(self.fast_width * self.memory.hidden_expansion)


class LaCTState(NamedTuple):
    """Attention and memory in the middle of a row."""

    cache: KVCache
    streamed: Streamed


class LaCT(nnx.Module):
    """h [B, T, D] -> [B, T, D], any T. In a row of at most one chunk the memory learns nothing."""

    def __init__(self, config: LaCTConfig, *, rngs: nnx.Rngs):
        self.config = config
        attention, memory = config.attention, config.memory
        D, N = attention.dim, memory.num_fast_heads
        std, dtype = attention.init_std, attention.precision.param_dtype
        self.qkv = normal_param(rngs, (D, 3 * D), ("embed", "heads"), std, dtype)
        if memory.has_qkv_bias:
            self.qkv_bias = param(jnp.zeros((3 * D,), dtype), ("heads",))
        if memory.has_qk_norm:
            self.query_norm = param(jnp.ones((D,), dtype), ("heads",))
            self.key_norm = param(jnp.ones((D,), dtype), ("heads",))
        self.qk_scale = param(jnp.ones((D, 2), dtype), ("heads", "rank"))
        self.qk_offset = param(jnp.zeros((D, 2), dtype), ("heads", "rank"))
        self._init_fast_weights(rngs)
        # Heads before matrices: [N, 3], the three rates of a head beside each other.
        self.rate = normal_param(rngs, (D, 3 * N), ("embed", "fast_heads"), std, dtype)
        self.rate_bias = param(jnp.zeros((3 * N,), dtype), ("fast_heads",))
        if memory.has_scale:
            self.scale = normal_param(rngs, (D, N), ("embed", "fast_heads"), std, dtype)
            self.scale_bias = param(jnp.zeros((N,), dtype), ("fast_heads",))
        if memory.has_momentum:
            self.momentum = normal_param(rngs, (D, N), ("embed", "fast_heads"), std, dtype)
            self.momentum_bias = param(jnp.zeros((N,), dtype), ("fast_heads",))
        self.fast_norm = param(jnp.ones((config.fast_width,), dtype), ("head_dim",))
        self.out = normal_param(rngs, (D, D), ("heads", "embed"), std, dtype)

    def _init_fast_weights(self, rngs: nnx.Rngs) -> None:
        N, r = self.config.memory.num_fast_heads, self.config.memory.low_rank
        H, F = self.config.fast_width, self.config.fast_hidden
        dtype = self.config.attention.precision.param_dtype

        def start(shape: tuple[int, ...], inner: str, outer: str, std: float) -> nnx.Param:
            return normal_param(rngs, (N, *shape), ("fast_heads", inner, outer), std, dtype)

        if r is None:
            self.w0 = start((H, F), "head_dim", "fast_mlp", H**-0.5)
            self.w2 = start((H, F), "head_dim", "fast_mlp", H**-0.5)
        else:
            self.w0_left = start((r, F), "rank", "fast_mlp", 0.5 * r**-0.5)
            self.w0_right = start((H, r), "head_dim", "rank", 0.5 * H**-0.5)
            self.w2_left = start((r, F), "rank", "fast_mlp", 0.5 * r**-0.5)
            self.w2_right = start((H, r), "head_dim", "rank", 0.5 * H**-0.5)
        self.w1 = start((F, H), "fast_mlp", "head_dim", F**-0.5)

    def __call__(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        q, k, v = self._project(h)
        rotated = self._rotated(q, k, v, positions)
        seen = attend(self.config.attention, *rotated, segment_ids)
        memory, length = self.config.memory, h.shape[1]
        tokens = self._fast_inputs(h, q, k, v, positions)
        chunks = jax.tree.map(lambda x: to_chunks(x, memory.chunk_size), tokens)
        documents = segment_ids if memory.resets_at_document else None
        fast = lact_memory(self._rule(), self._start(), chunks, documents, length)
        return self._joined(h, seen, from_chunks(fast, length))

    def start(self, batch_size: int, max_length: int | None) -> LaCTState:
        """What `extend` finds in front of a row; `max_length` bounds rows of full attention."""
        config, size = self.config.attention, self.config.memory.chunk_size
        h = jax.ShapeDtypeStruct((batch_size, size, config.dim), config.precision.compute_dtype)
        positions = jax.ShapeDtypeStruct((batch_size, size), jnp.int32)
        tokens = jax.eval_shape(
            lambda h, positions: self._fast_inputs(h, *self._project(h), positions), h, positions
        )
        fresh = fresh_state(self._rule(), self._start(), tokens)
        held = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tokens)
        return LaCTState(start_cache(config, batch_size, max_length), Streamed(fresh, held))

    def extend(
        self, h: Float[Array, "B T D"], piece: Piece, state: LaCTState
    ) -> tuple[Float[Array, "B T D"], LaCTState]:
        """The same for a piece of a row of one document: (output, the state behind it)."""
        positions = piece.positions(h.shape[1])
        q, k, v = self._project(h)
        rotated = self._rotated(q, k, v, positions)
        seen, cache = attend_cached(self.config.attention, *rotated, piece, state.cache)
        tokens = self._fast_inputs(h, q, k, v, positions)
        memory = chunked_memory(self._rule(), self._start())
        fast, streamed = continued(memory, state.streamed, tokens.q, tokens, piece)
        return self._joined(h, seen, fast), LaCTState(cache, streamed)

    def _project(self, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k, v [B, T, D] before any rotation."""
        memory, dtype = self.config.memory, self.config.attention.precision.compute_dtype
        qkv = linear(h, self.qkv[...], dtype)
        if memory.has_qkv_bias:
            qkv = qkv + self.qkv_bias[...].astype(dtype)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        if memory.has_qk_norm:
            q = rms_norm(q, self.query_norm[...], NORM_EPS)
            k = rms_norm(k, self.key_norm[...], NORM_EPS)
        return q, k, v

    def _rotated(self, q, k, v, positions) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k, v [B, T, N, H] of the attention."""
        config = self.config.attention
        heads = (*q.shape[:2], config.num_heads, config.head_dim)
        q, k = (rotate(x.reshape(heads), positions, config.rope) for x in (q, k))
        return q, k, v.reshape(heads)

    def _fast_inputs(self, h, q, k, v, positions) -> FastInputs:
        """What the tokens bring to the memory, [B, T, ...]."""
        momentum = None
        if self.config.memory.has_momentum:
            momentum = jax.nn.sigmoid(self._gate(h, self.momentum, self.momentum_bias))
        return FastInputs(
            self._fast_feature(q, positions, 0),
            self._fast_feature(k, positions, 1),
            self._fast_value(v),
            rates=self._rates(h),
            momentum=momentum,
        )

    def _rule(self) -> FastRule:
        memory = self.config.memory
        return FastRule(
            orthogonalizes=memory.orthogonalizes_updates,
            keeps_raw=memory.keeps_raw_state,
            state_dtype=self.config.attention.precision.state_dtype,
        )

    def _joined(self, h, seen, fast) -> Float[Array, "B T D"]:
        """The output, from the attention's heads and what the memory says, normed and scaled."""
        fast = rms_norm(fast, self.fast_norm[...], NORM_EPS)
        if self.config.memory.has_scale:
            scale = jax.nn.silu(self._gate(h, self.scale, self.scale_bias))
            fast = (fast * scale[..., None]).astype(fast.dtype)
        both = seen.reshape(h.shape) + fast.reshape(h.shape)
        return linear(both, self.out[...], self.config.attention.precision.compute_dtype)

    def _fast_feature(self, x: jax.Array, positions: jax.Array, which: int) -> jax.Array:
        """q (`which` 0) or k (1) as the memory takes it [B, T, N, H]; float32 until the end."""
        config, memory = self.config.attention, self.config.memory
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scale, offset = (w[...][:, which].astype(wide) for w in (self.qk_scale, self.qk_offset))
        fast = x.astype(wide) * scale + offset
        if memory.has_qk_silu:
            fast = jax.nn.silu(fast)
        fast = unit(self._split(fast), -1)
        if memory.has_rope:
            heads = fast.reshape(*x.shape[:2], config.num_heads, config.head_dim)
            fast = self._split(rotate(heads, positions, config.rope).reshape(x.shape))
        return fast.astype(x.dtype)

    def _fast_value(self, v: jax.Array) -> jax.Array:
        memory = self.config.memory
        is_active = memory.has_qk_silu and memory.has_value_silu
        return self._split(jax.nn.silu(v) if is_active else v)

    def _split(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, N, H] in fast heads."""
        return x.reshape(*x.shape[:2], self.config.memory.num_fast_heads, -1)

    def _rates(self, h: jax.Array) -> Float[Array, "B T N 3"]:
        rates = jax.nn.softplus(self._gate(h, self.rate, self.rate_bias) + RATE_SHIFT)
        return rates.reshape(*h.shape[:2], -1, 3)

    def _gate(self, h: jax.Array, kernel: nnx.Param, bias: nnx.Param) -> jax.Array:
        """h kernel + bias in the state dtype: a bfloat16 rate moves in steps of 0.4 %."""
        precision = self.config.attention.precision
        narrow, wide = precision.compute_dtype, precision.state_dtype
        sums = product("BTD,DN->BTN", h.astype(narrow), kernel[...].astype(narrow), wide)
        return sums + bias[...].astype(wide)

    def _start(self) -> FastWeights:
        """The fast weights in front of every row and document."""
        if self.config.memory.low_rank is None:
            return FastWeights(self.w0[...], self.w1[...], self.w2[...])
        # In the state dtype: small, and what the running weights are added to.
        dtype = self.config.attention.precision.state_dtype
        identity = 0.5 * jnp.eye(self.config.fast_width, self.config.fast_hidden, dtype=dtype)

        def full(right: nnx.Param, left: nnx.Param) -> jax.Array:
            factors = (x[...].astype(dtype) for x in (right, left))
            return jnp.einsum("NHR,NRF->NHF", *factors) + identity

        w0 = full(self.w0_right, self.w0_left)
        w2 = full(self.w2_right, self.w2_left)
        return FastWeights(w0, self.w1[...], w2)
