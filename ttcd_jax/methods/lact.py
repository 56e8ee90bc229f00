"""LaCT: window attention and a SwiGLU memory that learns in large chunks, on one q/k/v projection.

    q, k, v = h W_qkv
    y = (attention(q, k, v) + silu(h W_s) * RMSNorm(f(fast q))) W_out          (scale per fast head)

f is the memory of `memory.fast_swiglu`, read by fast q and written with fast k and v: q and k after
a scale and an offset per channel, SiLU, unit length per fast head, rotary in the attention's head
layout. Published as "Test-Time Training Done Right" (Zhang et al. 2025), its language model form.
"""

import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ttcd_jax.axes import param
from ttcd_jax.config import Positive, PositiveFloat
from ttcd_jax.errors import UserError
from ttcd_jax.memory.chunks import chunk_segments, from_chunks, to_chunks
from ttcd_jax.memory.fast_swiglu import FastSwiGLU, FastWeights, FastWrites, unit
from ttcd_jax.memory.pieces import OpenChunk, over_piece, start_pieces
from ttcd_jax.memory.rows import check_parts, over_rows
from ttcd_jax.methods import registry
from ttcd_jax.nn.attention import QKV, AttentionConfig, sinks_of, start_cache
from ttcd_jax.nn.block import BlockConfig, Mixer, Names, SublayerConfig
from ttcd_jax.nn.linear import linear, normal_param, product, rms_norm
from ttcd_jax.nn.rope import rotate
from ttcd_jax.nn.row import Hidden, Piece, Row
from ttcd_jax.nn.windows import KVCache, Sinks, attend, attend_cached

NORM_EPS = 1e-5
# A learning rate is softplus(. + this): 0.001 where the projection is 0.
RATE_SHIFT = 0.001 + math.log(-math.expm1(-0.001))


class LaCTMemoryConfig(registry.Settings):
    """The settings of the method; the defaults are published, except `resets_at_document`
    (published: the memory leaks from document to document).

    `num_fast_heads` of the memory, with `hidden_expansion` hidden features per channel of a head,
    rounded down; `chunk_size` tokens learn at once. `low_rank`: w0 and w2 start as a product of
    this rank plus 0.5 I; None: full. `has_momentum`: updates have one, gated by token.
    `orthogonalizes_updates`: Newton-Schulz on every update. `keeps_raw_state`: updates add to
    weights that are normalized only for reads. `has_qk_silu`: SiLU on fast q and k, and, with
    `has_value_silu`, on v. `has_scale`: the gate silu(h W_s). `has_rope`: fast q and k are rotated.
    `has_qk_norm`: over the whole width, and `has_qkv_bias`, both for attention and memory.
    """

    num_fast_heads: Positive = 4
    hidden_expansion: PositiveFloat = 1
    chunk_size: Positive = 2048
    low_rank: Positive | None = 32
    has_momentum: bool = True
    orthogonalizes_updates: bool = False
    keeps_raw_state: bool = False
    has_qk_silu: bool = True
    has_value_silu: bool = True
    has_scale: bool = True
    has_rope: bool = True
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    resets_at_document: bool = True

    def switched_off(self, length: int) -> "LaCTMemoryConfig":
        """One chunk per row: every token reads the initial weights."""
        return self.replace(chunk_size=length)


class LaCTConfig(SublayerConfig):
    """`attention` has width, heads, window, rotary embedding, initialization and precision;
    `memory` the settings of the fast weights."""

    reference_names: ClassVar[Names] = {
        "qkv.weight": ("qkv", "linear"), "qkv.bias": ("qkv_bias", "same"),
        "o_proj.weight": ("out", "linear"), "q_norm.weight": ("query_norm", "same"),
        "k_norm.weight": ("key_norm", "same"), "qk_scale": ("qk_scale", "same"),
        "qk_offset": ("qk_offset", "same"), "w0": ("w0", "linear"), "w1": ("w1", "linear"),
        "w2": ("w2", "linear"), "w0.w_left": ("w0_left", "linear"),
        "w0.w_right": ("w0_right", "linear"), "w2.w_left": ("w2_left", "linear"),
        "w2.w_right": ("w2_right", "linear"), "lr_proj.weight": ("rate", "linear"),
        "lr_proj.bias": ("rate_bias", "same"), "ttt_scale_proj.weight": ("scale", "linear"),
        "ttt_scale_proj.bias": ("scale_bias", "same"), "ttt_norm.weight": ("fast_norm", "same"),
        "momentum_proj.0.weight": ("momentum", "linear"),
        "momentum_proj.0.bias": ("momentum_bias", "same"),
    }  # fmt: skip

    attention: AttentionConfig
    memory: LaCTMemoryConfig = LaCTMemoryConfig()

    def validate(self) -> None:
        attention, N = self.attention, self.memory.num_fast_heads
        if attention.kv_heads != attention.num_heads:
            raise UserError(
                f"LaCT shares its keys with the memory: num_kv_heads {attention.kv_heads} must "
                f"be num_heads {attention.num_heads}"
            )
        if attention.width != attention.dim:
            raise UserError(
                f"LaCT needs heads that fill the width: num_heads {attention.num_heads} times "
                f"head_dim {attention.head_size} must be dim {attention.dim}"
            )
        for name in ("has_qk_norm", "has_qkv_bias"):
            if getattr(attention, name):
                raise UserError(
                    f"attention.{name} is for projections of its own; LaCT shares one with the "
                    f"memory: set memory.{name}"
                )
        if attention.has_sink_logits:
            raise UserError("LaCT has no has_sink_logits: take sink_tokens")
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

    @property
    def chunk_size(self) -> int | None:
        return self.memory.chunk_size

    def flops(self, length: int) -> int | float:
        attention, unit = self.attention, 2 * self.attention.dim * self.fast_hidden
        projections = 2 * length * attention.dim * 4 * attention.width
        written = length - 1 - (length - 1) % self.memory.chunk_size  # the last chunk does not
        memory = unit * (3 * length + 6 * written)
        return projections + attention.score_flops(length) + memory


class LaCTState(NamedTuple):
    """Attention and memory in the middle of a row."""

    cache: KVCache
    chunks: OpenChunk


class LaCT(Mixer, config=LaCTConfig):
    """h [B, T, D] -> [B, T, D], any T. In a row of at most one chunk the memory learns nothing."""

    def __init__(self, config: LaCTConfig, *, rngs: nnx.Rngs) -> None:
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
        self.qk_scale = param(jnp.ones((D, 2), dtype), ("heads", "rank"), is_operand=False)
        self.qk_offset = param(jnp.zeros((D, 2), dtype), ("heads", "rank"), is_operand=False)
        self._init_fast_weights(rngs)
        # Heads before matrices: [N, 3], the three rates of a head next to each other.
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
            axes = ("fast_heads", inner, outer)
            return normal_param(rngs, (N, *shape), axes, std, dtype, is_operand=False)

        if r is None:
            self.w0 = start((H, F), "head_dim", "fast_mlp", H**-0.5)
            self.w2 = start((H, F), "head_dim", "fast_mlp", H**-0.5)
        else:
            self.w0_left = start((r, F), "rank", "fast_mlp", 0.5 * r**-0.5)
            self.w0_right = start((H, r), "head_dim", "rank", 0.5 * H**-0.5)
            self.w2_left = start((r, F), "rank", "fast_mlp", 0.5 * r**-0.5)
            self.w2_right = start((H, r), "head_dim", "rank", 0.5 * H**-0.5)
        self.w1 = start((F, H), "fast_mlp", "head_dim", F**-0.5)

    def forward(self, x: Hidden, row: Row, student: Hidden | None = None) -> tuple[Hidden, None]:
        attention, memory, length = self.config.attention, self.config.memory, x.shape[1]
        check_parts(length, memory.chunk_size)
        offsets = row.offsets if attention.sink_tokens else row.positions
        qkv, sinks, operands = self._operands(x, row.positions, offsets)
        windows, implementation = (attention.window,), attention.attention_implementation
        (seen,) = attend(*qkv, row.segment_ids, windows, implementation, sinks)
        reads, writes = jax.tree.map(lambda x: to_chunks(x, memory.chunk_size), operands)
        ids = row.segment_ids if memory.resets_at_document else None
        segments = chunk_segments(ids, memory.chunk_size)
        fast, _ = over_rows(self._memory(), reads, writes, segments, length=length)
        return self._joined(x, seen, from_chunks(fast, length)), None

    def start(self, batch_size: int, max_length: int | None) -> LaCTState:
        config, size = self.config.attention, self.config.memory.chunk_size
        h = jax.ShapeDtypeStruct((batch_size, size, config.dim), config.precision.compute_dtype)
        positions = jax.ShapeDtypeStruct((batch_size, size), jnp.int32)
        _, _, (_, writes) = jax.eval_shape(self._operands, h, positions, positions)
        chunks = start_pieces(self._memory(), batch_size, writes)
        return LaCTState(start_cache(config, batch_size, max_length), chunks)

    def extend(
        self, x: Hidden, piece: Piece, state: LaCTState, student: Hidden | None = None
    ) -> tuple[Hidden, LaCTState]:
        attention = self.config.attention
        positions = piece.positions(x.shape[1])
        qkv, sinks, (reads, writes) = self._operands(x, positions, positions)
        windows, implementation = (attention.window,), attention.attention_implementation
        (seen,), cache = attend_cached(*qkv, piece, state.cache, windows, implementation, sinks)
        fast, chunks = over_piece(
            self._memory(), state.chunks, reads, writes, piece, self.config.chunk_size
        )
        return self._joined(x, seen, fast), LaCTState(cache, chunks)

    def _operands(
        self, h: jax.Array, positions: jax.Array, offsets: jax.Array
    ) -> tuple[QKV, Sinks, tuple[jax.Array, FastWrites]]:
        """(q, k, v [B, T, N, H] of the attention; its sinks; operands of the memory's reads and of
        its writes, [B, T, ...])."""
        config, memory = self.config.attention, self.config.memory
        qkv = linear(h, self.qkv[...], config.precision.compute_dtype)
        if memory.has_qkv_bias:
            qkv = qkv + self.qkv_bias[...].astype(qkv.dtype)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        if memory.has_qk_norm:
            q = rms_norm(q, self.query_norm[...], NORM_EPS)
            k = rms_norm(k, self.key_norm[...], NORM_EPS)
        heads = (*h.shape[:2], config.num_heads, config.head_size)
        sinks = sinks_of(config, q.reshape(heads), positions, offsets)
        turned_q, turned_k = (rotate(x.reshape(heads), positions, config.rope) for x in (q, k))
        momentum = None
        if memory.has_momentum:
            momentum = jax.nn.sigmoid(self._gate(h, self.momentum, self.momentum_bias))
        fast_q, fast_k = (self._fast_feature(x, i, positions) for i, x in enumerate((q, k)))
        is_active = memory.has_qk_silu and memory.has_value_silu
        fast_v = self._split(jax.nn.silu(v) if is_active else v)
        writes = FastWrites(fast_k, fast_v, self._rates(h), momentum)
        return (turned_q, turned_k, v.reshape(heads)), sinks, (fast_q, writes)

    def _memory(self) -> FastSwiGLU:
        memory, dtype = self.config.memory, self.config.attention.precision.state_dtype
        fields = memory.orthogonalizes_updates, memory.keeps_raw_state, memory.has_momentum
        return FastSwiGLU(self._start(), *fields, state_dtype=dtype)

    def _joined(self, h: jax.Array, seen: jax.Array, fast: jax.Array) -> Hidden:
        fast = rms_norm(fast, self.fast_norm[...], NORM_EPS)
        if self.config.memory.has_scale:
            scale = jax.nn.silu(self._gate(h, self.scale, self.scale_bias))
            fast = (fast * scale[..., None]).astype(fast.dtype)
        both = seen.reshape(h.shape) + fast.reshape(h.shape)
        return linear(both, self.out[...], self.config.attention.precision.compute_dtype)

    def _fast_feature(self, x: jax.Array, index: int, positions: jax.Array) -> jax.Array:
        """The memory's q (0) or k (1) [B, T, N, H], in float32 or wider until the end."""
        config, memory = self.config.attention, self.config.memory
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scale, offset = (w[:, index].astype(wide) for w in (self.qk_scale, self.qk_offset))
        fast = x.astype(wide) * scale + offset
        if memory.has_qk_silu:
            fast = jax.nn.silu(fast)
        fast = unit(self._split(fast), -1)
        if memory.has_rope:
            heads = fast.reshape(*x.shape[:2], config.num_heads, config.head_size)
            fast = self._split(rotate(heads, positions, config.rope).reshape(x.shape))
        return fast.astype(x.dtype)

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
        if self.config.memory.low_rank is None:
            return FastWeights(self.w0[...], self.w1[...], self.w2[...])
        # In the state dtype: small, and the start of the running weights.
        dtype = self.config.attention.precision.state_dtype
        identity = 0.5 * jnp.eye(self.config.fast_width, self.config.fast_hidden, dtype=dtype)

        def full(right: nnx.Param, left: nnx.Param) -> jax.Array:
            factors = (x[...].astype(dtype) for x in (right, left))
            return jnp.einsum("NHR,NRF->NHF", *factors) + identity

        w0 = full(self.w0_right, self.w0_left)
        w2 = full(self.w2_right, self.w2_left)
        return FastWeights(w0, self.w1[...], w2)


def _block(config: registry.ModelConfig, settings: LaCTMemoryConfig) -> BlockConfig:
    mixer = LaCTConfig(attention=config.attention(), memory=settings)
    return BlockConfig(mixer=mixer, mlp=config.mlp())


def _read(source: registry.Source) -> dict[str, Any]:
    rank = source.number("w0_w2_low_rank", -1)
    return {
        "memory.low_rank": rank if rank > 0 else None,
        "memory.has_value_silu": not source.flag("no_v_silu", False),
        "memory.has_rope": not source.flag("ttt_nope", False),
    }


def _write(config: registry.ModelConfig, settings: LaCTMemoryConfig) -> dict[str, Any]:
    return {
        "w0_w2_low_rank": settings.low_rank or -1,
        "no_v_silu": not settings.has_value_silu,
        "ttt_nope": not settings.has_rope,
    }


_KEYS = (
    *registry.COMMON_KEYS,
    registry.Key("num_attn_heads", "num_heads"),
    registry.Key("window_size", "window", None),
    registry.Key("rope_theta", "rope.base", 10000.0),
    registry.Key("num_lact_heads", "memory.num_fast_heads"),
    registry.Key("inter_multi", "memory.hidden_expansion", 1),
    registry.Key("lact_chunk_size", "memory.chunk_size", 2048),
    registry.Key("use_momentum", "memory.has_momentum", False),
    registry.Key("use_muon", "memory.orthogonalizes_updates", False),
    registry.Key("ttt_prenorm", "memory.keeps_raw_state", False),
    registry.Key("qkv_silu", "memory.has_qk_silu", True),
    registry.Key("learnable_ttt_scale", "memory.has_scale", False),
    registry.Key("attn_qk_norm", "memory.has_qk_norm", False),
    registry.Key("qkv_bias", "memory.has_qkv_bias", False),
)
_FIXED = {"lr_dim": 1, "lr_parameterization": "mamba"}
_REFERENCE = registry.Reference(("lact",), _KEYS, _FIXED, _read, _write)
registry.register(registry.Method("lact", "LaCT", _block, "all", LaCTMemoryConfig, _REFERENCE))
