"""Grouped-query attention: one QKV projection under one window, or under a teacher's and a
student's."""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels.dual_window.api import Implementation

from ttcd_jax.axes import param
from ttcd_jax.config import NonNegative, NonNegativeFloat, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.nn.block import Dims, Mixer, Names, Output, SublayerConfig, Views
from ttcd_jax.nn.linear import linear, normal_param, rms_norm
from ttcd_jax.nn.rope import RopeConfig, rotate
from ttcd_jax.nn.row import Hidden, Piece, Row
from ttcd_jax.nn.windows import KVCache, Sinks, Windows, attend, attend_cached

QKV = tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]


class Heads(Dims):
    """The attention of a model, the same in all its layers.

    `num_heads` query heads and `num_kv_heads` key heads (None: as many), of `head_dim` channels
    (None: dim / num_heads), with the rotary embedding `rope`. `window`: tokens that a query sees,
    itself included; None is full attention. `has_qk_norm`: q and k of every head are normalized,
    with `qk_norm_eps`, 1e-6 in Hugging Face's Qwen3 and 1e-5 in the reference implementation,
    whatever its other norms use. `has_qkv_bias`: q, k and v have biases, as Qwen2's.
    `attention_implementation`: a kernel by its name in `ttcd_kernels`, or the one that fits.
    `sink_tokens`: so many first tokens of its document a query sees besides its window, from no
    farther than the query at position `sink_reach` - 1 would: the context that the model was
    trained on, beyond which the rotary embedding is unknown to it; None: from where it is.
    `has_sink_logits`: every head has a learned term in the denominator of its softmax.
    """

    num_heads: Positive
    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    window: Positive | None = None
    rope: RopeConfig = RopeConfig()
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    qk_norm_eps: NonNegativeFloat = 1e-6
    attention_implementation: Implementation = "auto"
    sink_tokens: NonNegative = 0
    sink_reach: Positive | None = None
    has_sink_logits: bool = False

    def validate(self) -> None:
        N, K, H = self.num_heads, self.kv_heads, self.head_size
        if self.head_dim is None and self.dim % N:
            raise UserError(f"num_heads {N} does not divide dim {self.dim}; set head_dim")
        if N % K:
            raise UserError(f"num_kv_heads {K} does not divide num_heads {N}")
        if H % 2:
            raise UserError(f"head_dim {H} is odd; rotary embedding turns pairs")
        least = (self.window or 0) + self.sink_tokens
        if self.sink_reach is not None and self.sink_reach < least:
            raise UserError(
                f"sink_reach {self.sink_reach} is less than window {self.window} and sink_tokens "
                f"{self.sink_tokens}: set it to {least} or more"
            )

    @property
    def kv_heads(self) -> int:
        """K, resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """H, resolved."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def width(self) -> int:
        """N * H."""
        return self.num_heads * self.head_size


class AttentionConfig(Heads, SublayerConfig):
    """Attention as a layer."""

    reference_names: ClassVar[Names] = {
        "q_proj.weight": ("query", "linear"), "k_proj.weight": ("key", "linear"),
        "v_proj.weight": ("value", "linear"), "o_proj.weight": ("out", "linear"),
        "q_proj.bias": ("query_bias", "same"), "k_proj.bias": ("key_bias", "same"),
        "v_proj.bias": ("value_bias", "same"), "q_norm.weight": ("query_norm", "same"),
        "k_norm.weight": ("key_norm", "same"), "sinks": ("sink", "same"),
    }  # fmt: skip

    def flops(self, length: int) -> int | float:
        narrow = self.kv_heads * self.head_size
        return 2 * length * self.dim * 2 * (self.width + narrow) + self.score_flops(length)

    def score_flops(self, length: int) -> int | float:
        """q k^T and the weighted values."""
        beyond = length - (self.window or length)
        pairs = sum(max(beyond - sink, 0) for sink in range(min(self.sink_tokens, length)))
        return 4 * (visible_pairs(length, self.window) + pairs) * self.width


def visible_pairs(length: int, window: int | None) -> int:
    """The number of (query, key) pairs in a causal window over a row of `length` tokens."""
    window = length if window is None else min(window, length)
    return window * (window + 1) // 2 + (length - window) * window


class Attention(Mixer, config=AttentionConfig):
    """h [B, T, D] -> [B, T, D]: projections, optional q/k norm, rotary, window attention,
    output."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.windows: Windows = (config.window,)
        D, H, wide = config.dim, config.head_size, config.width
        narrow = config.kv_heads * H
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
        if config.has_sink_logits:
            self.sink = param(jnp.zeros((config.num_heads,), dtype), ("heads",))

    def forward(self, x: Hidden, row: Row, student: Hidden | None = None) -> tuple[Output, None]:
        return _output(self.over_row(x, row, self.windows)), None

    def over_row(self, x: Hidden, row: Row, windows: Windows) -> list[Hidden]:
        """What attention adds to the stream, under each of these windows."""
        offsets = row.offsets if self.config.sink_tokens else row.positions
        qkv, sinks = self.project(x, row.positions, offsets)
        options = windows, self.config.attention_implementation, sinks
        return [*map(self.project_out, attend(*qkv, row.segment_ids, *options))]

    def start(self, batch_size: int, max_length: int | None) -> KVCache:
        return start_cache(self.config, batch_size, max_length)

    def extend(
        self, x: Hidden, piece: Piece, state: KVCache, student: Hidden | None = None
    ) -> tuple[Output, KVCache]:
        views, state = self.over_piece(x, piece, state, self.windows)
        return _output(views), state

    def over_piece(
        self, x: Hidden, piece: Piece, state: KVCache, windows: Windows
    ) -> tuple[list[Hidden], KVCache]:
        positions = piece.positions(x.shape[1])
        qkv, sinks = self.project(x, positions, positions)
        options = windows, self.config.attention_implementation, sinks
        seen, state = attend_cached(*qkv, piece, state, *options)
        return [*map(self.project_out, seen)], state

    def project(
        self, h: Hidden, positions: Int[Array, "B T"], offsets: Int[Array, "B T"]
    ) -> tuple[QKV, Sinks]:
        """((rotated q and k, v), the sinks of these queries, `offsets` into their documents)."""
        config, dtype = self.config, self.config.precision.compute_dtype
        heads = (*h.shape[:2], -1, config.head_size)
        q, k, v = (linear(h, w[...], dtype) for w in (self.query, self.key, self.value))
        if config.has_qkv_bias:
            biases = (self.query_bias, self.key_bias, self.value_bias)
            q, k, v = (x + b[...].astype(dtype) for x, b in zip((q, k, v), biases, strict=True))
        q, k, v = (x.reshape(heads) for x in (q, k, v))
        if config.has_qk_norm:
            q = rms_norm(q, self.query_norm[...], config.qk_norm_eps)
            k = rms_norm(k, self.key_norm[...], config.qk_norm_eps)
        logits = self.sink[...] if config.has_sink_logits else None
        sinks = sinks_of(config, q, positions, offsets)._replace(logits=logits)
        return (rotate(q, positions, config.rope), rotate(k, positions, config.rope), v), sinks

    def project_out(self, heads: Float[Array, "B T N H"]) -> Hidden:
        flat = heads.reshape(*heads.shape[:2], -1)
        return linear(flat, self.out[...], self.config.precision.compute_dtype)


def sinks_of(
    config: Heads,
    q: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    offsets: Int[Array, "B T"],
) -> Sinks:
    """The sinks of queries that are not rotated yet, `offsets` into their documents."""
    if not config.sink_tokens:
        return Sinks()
    queries = None
    if config.sink_reach is not None:
        beyond = jnp.maximum(offsets - (config.sink_reach - 1), 0)
        queries = rotate(q, positions - beyond, config.rope)
    return Sinks(config.sink_tokens, offsets, queries=queries)


def _output(views: list[Hidden]) -> Output:
    return Views(*views) if views[1:] else views[0]


def start_cache(config: AttentionConfig, batch_size: int, max_length: int | None) -> KVCache:
    """An empty cache for the positions that the window reaches, or for `max_length` of them under
    full attention. Raises `UserError` when that is None."""
    slots = max_length if config.window is None else config.window
    if slots is None:
        raise UserError(
            "full attention keeps all keys: give max_length, the most tokens that a row will have"
        )
    count = 0 if config.window is None else config.sink_tokens
    sizes = (slots, slots, count, count)
    shapes = [(batch_size, size, config.kv_heads, config.head_size) for size in sizes]
    # As many arrays: the state is donated, and no buffer can be donated twice.
    keys, values, *sinks = (jnp.zeros(x, config.precision.compute_dtype) for x in shapes)
    return KVCache(keys, values, (sinks[0], sinks[1]) if count else None)


class DualWindowConfig(SublayerConfig):
    """`attention.window` is the teacher's window, `student_window` the student's."""

    reference_names: ClassVar[Names] = AttentionConfig.reference_names

    attention: AttentionConfig
    student_window: Positive

    def validate(self) -> None:
        teacher = self.attention.window
        if teacher is not None and self.student_window > teacher:
            raise UserError(
                f"student_window {self.student_window} is wider than the teacher's window "
                f"{teacher}: bind student_window, or its default holds, to the shorter one"
            )

    def flops(self, length: int) -> int | float:
        """The teacher's and one more output projection: the student's scores are among the
        teacher's."""
        attention = self.attention
        return attention.flops(length) + 2 * length * attention.dim * attention.width


class DualWindowAttention(Attention, config=DualWindowConfig):
    """h [B, T, D] -> (teacher, student), both [B, T, D] after the same output projection.

    The first `student_window` tokens of a document are equal in both. Gradient flows through both.
    """

    def __init__(self, config: DualWindowConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config.attention, rngs=rngs)
        self.windows = config.attention.window, config.student_window
