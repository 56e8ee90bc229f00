"""DeltaNet: a mixer whose memory is one matrix per head, written by the delta rule.

    q, k, v = silu(conv(h W))      over the row, each document for itself;  beta = sigmoid(h W_rate)
    o = delta_rule(q / |q|, k / |k|, v, beta),   y = RMSNorm(o) W_out       norm per head

`DeltaSublayer` is its bare form, without convolution, SiLU and norm: the residual sub-layer that
the paper's hybrid baseline puts behind attention.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels.short_conv.xla import short_conv

from ttcd_jax.axes import param
from ttcd_jax.config import Config, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.memory.delta_rule import delta_rule as continued_delta_rule
from ttcd_jax.memory.delta_rule import l2_normalize_inside
from ttcd_jax.nn.linear import linear, normal_param
from ttcd_jax.nn.norm import rms_norm
from ttcd_jax.nn.product import product
from ttcd_jax.nn.stream import Piece, next_tail, real, with_tail
from ttcd_jax.precision import Precision
from ttcd_jax.sharding.attention import convolved_row
from ttcd_jax.sharding.recurrent import delta_rule

# q and k [B, T, N * H], v [B, T, N * X].
Channels = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRuleConfig(Config):
    """The switches of the method. `chunk_size` changes the speed, not the result."""

    num_taps: Positive = 4
    value_expansion: float = 1  # value head dim over key head dim
    chunk_size: Positive = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(Config):
    """`head_dim` is that of queries and keys. `DeltaSublayer` has neither taps nor a norm."""

    dim: Positive
    num_heads: Positive
    head_dim: Positive
    rule: DeltaRuleConfig = DeltaRuleConfig()
    norm_eps: float = 1e-6
    init_std: float = 0.02
    precision: Precision = Precision()

    def validate(self) -> None:
        exact = self.head_dim * self.rule.value_expansion
        if self.value_head_dim < 1 or not math.isclose(exact, self.value_head_dim):
            raise UserError(
                f"head_dim {self.head_dim} times value_expansion {self.rule.value_expansion} is "
                f"{exact:g}; the value head dim must be a whole number, at least 1"
            )

    @property
    def value_head_dim(self) -> int:
        return round(self.head_dim * self.rule.value_expansion)


class DeltaState(NamedTuple):
    """A delta rule in the middle of a row."""

    memory: Float[Array, "B N H X"]
    tail: Channels | None  # raw q, k, v that the convolutions look back at [B, R - 1, ...]


class DeltaSublayer(nnx.Module):
    """h [B, T, D] -> [B, T, D]: q, k, v linear in h, beta = sigmoid(h W_rate), delta rule,
    output."""

    def __init__(self, config: DeltaNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, N, std = config.dim, config.num_heads, config.init_std
        dtype = config.precision.param_dtype
        keys, values = N * config.head_dim, N * config.value_head_dim
        self.query = normal_param(rngs, (D, keys), ("embed", "heads"), std, dtype)
        self.key = normal_param(rngs, (D, keys), ("embed", "heads"), std, dtype)
        self.value = normal_param(rngs, (D, values), ("embed", "heads"), std, dtype)
        self.rate = normal_param(rngs, (D, N), ("embed", "heads"), std, dtype)
        self.out = normal_param(rngs, (values, D), ("heads", "embed"), std, dtype)

    def __call__(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """`positions` are part of every mixer's call; the delta rule knows order without them."""
        return self._project_out(self._read(h, self._project(h), segment_ids))

    def start(self, batch_size: int, max_length: int | None = None) -> DeltaState:
        """What `extend` finds in front of a row; a state has no length to bound."""
        config = self.config
        heads = batch_size, config.num_heads, config.head_dim, config.value_head_dim
        return DeltaState(jnp.zeros(heads, config.precision.state_dtype), None)

    def extend(
        self, h: Float[Array, "B T D"], piece: Piece, state: DeltaState
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """The same for a piece of a row of one document: (output, the state behind it)."""
        o, memory = self._read_piece(h, self._project(h), piece, state)
        return self._project_out(o), DeltaState(memory, None)

    def _project(self, h) -> Channels:
        dtype = self.config.precision.compute_dtype
        q, k, v = (linear(h, w[...], dtype) for w in (self.query, self.key, self.value))
        return q, k, v

    def _read(
        self,
        h: Float[Array, "B T D"],
        channels: Channels,
        segment_ids: Int[Array, "B T"] | None,
        log_decay: Float[Array, "B T N"] | None = None,
    ) -> Float[Array, "B T N X"]:
        """What the memory answers to q."""
        return delta_rule(
            *self._normalized(channels),
            self._rates(h),
            log_decay=log_decay,
            segment_ids=segment_ids,
            chunk_size=self.config.rule.chunk_size,
            state_dtype=self.config.precision.state_dtype,
        )

    def _read_piece(self, h, channels: Channels, piece: Piece, state: DeltaState, log_decay=None):
        """(what the memory answers to q, the memory behind the piece). Padding neither writes nor
        forgets."""
        return continued_delta_rule(
            *self._normalized(channels),
            real(self._rates(h), piece),
            log_decay=None if log_decay is None else real(log_decay, piece),
            initial_state=state.memory,
            chunk_size=self.config.rule.chunk_size,
            state_dtype=self.config.precision.state_dtype,
        )

    def _normalized(self, channels: Channels) -> Channels:
        """q, k, v [B, T, N, ...]; q and k of unit length per head."""
        heads = self.config.num_heads
        q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in channels)
        return l2_normalize_inside(q), l2_normalize_inside(k), v

    def _rates(self, h) -> Float[Array, "B T N"]:
        return jax.nn.sigmoid(self._per_head(h, self.rate))

    def _per_head(self, h, weight: nnx.Param) -> Float[Array, "B T N"]:
        """h W for the argument of a gate, in float32 or better: gates multiply over many tokens."""
        narrow = self.config.precision.compute_dtype
        wide = jnp.promote_types(self.config.precision.state_dtype, jnp.float32)
        return product("BTD,DN->BTN", h.astype(narrow), weight[...].astype(narrow), wide)

    def _project_out(self, o: Float[Array, "B T N X"]) -> Float[Array, "B T D"]:
        flat = o.reshape(*o.shape[:2], -1)
        return linear(flat, self.out[...], self.config.precision.compute_dtype)


class DeltaNet(DeltaSublayer):
    """h [B, T, D] -> [B, T, D]: the sub-layer with short convolutions and a norm per head."""

    def __init__(self, config: DeltaNetConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.query_conv = self._init_conv(rngs, config.head_dim)
        self.key_conv = self._init_conv(rngs, config.head_dim)
        self.value_conv = self._init_conv(rngs, config.value_head_dim)
        ones = jnp.ones((config.value_head_dim,), config.precision.param_dtype)
        self.head_norm = param(ones, ("head_dim",))

    def _init_conv(self, rngs: nnx.Rngs, head_dim: int) -> nnx.Param:
        """Taps [R, N * head_dim] uniform in +-1/sqrt(R), as torch starts a depthwise
        convolution."""
        shape = (self.config.rule.num_taps, self.config.num_heads * head_dim)
        bound, dtype = shape[0] ** -0.5, self.config.precision.param_dtype
        taps = jax.random.uniform(rngs.params(), shape, dtype, -bound, bound)
        return param(taps, ("taps", "heads"))

    def __call__(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """`positions` are part of every mixer's call; the delta rule knows order without them."""
        o = self._read(h, self._convolved(h, segment_ids), segment_ids)
        return self._project_out(self._normed(o))

    def start(self, batch_size: int, max_length: int | None = None) -> DeltaState:
        """What `extend` finds in front of a row; a state has no length to bound."""
        back, dtype = self.config.rule.num_taps - 1, self.config.precision.compute_dtype
        if not back:
            return super().start(batch_size)
        q, k, v = (jnp.zeros((batch_size, back, w[...].shape[1]), dtype) for w in self._taps())
        return super().start(batch_size)._replace(tail=(q, k, v))

    def extend(
        self, h: Float[Array, "B T D"], piece: Piece, state: DeltaState
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """The same for a piece of a row of one document: (output, the state behind it)."""
        channels, tail = self._convolved_piece(h, piece, state)
        o, memory = self._read_piece(h, channels, piece, state)
        return self._project_out(self._normed(o)), DeltaState(memory, tail)

    def _convolved(self, h, segment_ids) -> Channels:
        """silu(conv(q, k, v))."""

        def convolve(x, taps, segment_ids):
            ids = None if segment_ids is None else segment_ids[:, None]
            return _convolved_row(x, taps, ids)

        q, k, v = (
            jax.nn.silu(convolved_row(convolve, x, w[...], segment_ids))
            for x, w in zip(self._project(h), self._taps(), strict=True)
        )
        return q, k, v

    def _convolved_piece(self, h, piece: Piece, state: DeltaState) -> tuple[Channels, Any]:
        """(silu(conv(q, k, v)), the tokens that the next piece's convolutions look back at)."""
        new = self._project(h)
        if state.tail is None:
            around, tail = new, None
        else:
            around = jax.tree.map(with_tail, state.tail, new)
            tail = jax.tree.map(lambda tail, x: next_tail(tail, x, piece), state.tail, new)
        q, k, v = (
            jax.nn.silu(_convolved_row(x, w[...], None)[:, -h.shape[1] :])
            for x, w in zip(around, self._taps(), strict=True)
        )
        return (q, k, v), tail

    def _taps(self) -> tuple[nnx.Param, nnx.Param, nnx.Param]:
        return self.query_conv, self.key_conv, self.value_conv

    def _normed(self, o: Float[Array, "B T N X"]) -> Float[Array, "B T N X"]:
        return rms_norm(o, self.head_norm[...], self.config.norm_eps)


def _convolved_row(x, taps, segment_ids) -> Float[Array, "B T X"]:
    """The causal convolution of a row, which is one chunk of it."""
    return short_conv(x[:, None], taps, is_causal=True, segment_ids=segment_ids)[:, 0]
