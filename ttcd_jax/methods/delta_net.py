"""DeltaNet: a mixer whose memory is one matrix per head, written by the delta rule.

    q, k, v = silu(conv(h W))      along the row, within documents;  beta = sigmoid(h W_rate)
    o = delta_rule(q / |q|, k / |k|, v, beta),   y = RMSNorm(o) W_out       norm per head

Its bare form, without convolution, SiLU and norm, is the residual sub-layer that the paper's hybrid
baseline puts after attention.
"""

import functools
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels.short_conv import short_conv

from ttcd_jax.axes import param
from ttcd_jax.config import Positive, PositiveFloat
from ttcd_jax.errors import UserError
from ttcd_jax.memory.delta_rule import DeltaMemory, DeltaWrites, l2_normalize_inside
from ttcd_jax.memory.rows import over_rows
from ttcd_jax.methods import registry
from ttcd_jax.nn.block import BlockConfig, Dims, Mixer, Names, SublayerConfig
from ttcd_jax.nn.linear import linear, normal_param, product, rms_norm
from ttcd_jax.nn.row import Hidden, Piece, Row, after_tail, next_tail, no_tail, zero_padding
from ttcd_jax.sharding import rules, sequence

# q and k [B, T, N * H], v [B, T, N * X].
Channels = tuple[jax.Array, jax.Array, jax.Array]


class DeltaRuleConfig(registry.Settings):
    """The settings of the method. `num_taps` of its convolutions, which begin as `conv_init`:
    "previous" starts keys as the queries of the token before. `value_expansion`: channels of a
    value head per channel of a key head; `chunk_size` changes the speed, not the result."""

    num_taps: Positive = 4
    conv_init: Literal["uniform", "previous"] = "uniform"
    value_expansion: PositiveFloat = 1
    chunk_size: Positive = 64


class DeltaSublayerConfig(Dims, SublayerConfig):
    """`num_heads` memories whose queries and keys have `head_dim` columns, written by `rule`. The
    bare sub-layer has neither taps nor a norm."""

    reference_names: ClassVar[Names] = {
        "q_proj.weight": ("query", "linear"), "k_proj.weight": ("key", "linear"),
        "v_proj.weight": ("value", "linear"), "o_proj.weight": ("out", "linear"),
        "b_proj.weight": ("rate", "linear"),
    }  # fmt: skip

    has_convs: ClassVar[bool] = False

    num_heads: Positive
    head_dim: Positive
    rule: DeltaRuleConfig = DeltaRuleConfig()

    def validate(self) -> None:
        if self.rule.conv_init == "previous" and not self.has_convs:
            raise UserError(
                "the bare sub-layer has no convolution to start at the token before: leave out "
                "conv_init='previous', or take method gated_deltanet_hybrid"
            )
        if self.rule.conv_init == "previous" and self.rule.num_taps == 1:
            raise UserError("a convolution of num_taps=1 has no tap for the token before: use 2")
        exact = self.head_dim * self.rule.value_expansion
        if self.value_head_dim < 1 or not math.isclose(exact, self.value_head_dim):
            raise UserError(
                f"head_dim {self.head_dim} times value_expansion {self.rule.value_expansion} is "
                f"{exact:g}; the value head dim must be a whole number, at least 1"
            )

    @property
    def value_head_dim(self) -> int:
        """X."""
        return round(self.head_dim * self.rule.value_expansion)

    def flops(self, length: int) -> int | float:
        N, H, X = self.num_heads, self.head_dim, self.value_head_dim
        chunk = min(self.rule.chunk_size, length)
        projections = 2 * length * self.dim * N * (2 * H + 2 * X)
        # Overlaps k k^T and q k^T, the solved system, scores times u; then the inverse by doubling.
        inside = 2 * length * N * chunk * (2 * H + (H + X) + X)
        padded = 1 << (chunk - 1).bit_length()
        inside += length / chunk * N * 2 * padded * (padded**2 - 1) / 3
        state = 3 * 2 * length * N * H * X  # two reads, one write
        return projections + inside + state


class DeltaNetConfig(DeltaSublayerConfig):
    """The sub-layer with convolutions and a norm."""

    has_convs: ClassVar[bool] = True
    reference_names: ClassVar[Names] = DeltaSublayerConfig.reference_names | {
        "q_conv1d.weight": ("query_conv", "conv"),
        "k_conv1d.weight": ("key_conv", "conv"),
        "v_conv1d.weight": ("value_conv", "conv"),
        "o_norm.weight": ("head_norm", "same"),
    }


class DeltaState(NamedTuple):
    """A delta rule in the middle of a row."""

    memory: Float[Array, "B N H X"]
    tail: Channels | None  # raw q, k, v that the convolutions look back at [B, R - 1, ...]

    def kinds(self) -> dict[str, object]:
        return {"memory": self.memory, "open chunk": self.tail}


class DeltaNet(Mixer, config=DeltaSublayerConfig):
    """h [B, T, D] -> [B, T, D]."""

    def __init__(self, config: DeltaSublayerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        D, N, std = config.dim, config.num_heads, config.init_std
        dtype = config.precision.param_dtype
        keys, values = N * config.head_dim, N * config.value_head_dim
        self.query = normal_param(rngs, (D, keys), ("embed", "heads"), std, dtype)
        self.key = normal_param(rngs, (D, keys), ("embed", "heads"), std, dtype)
        self.value = normal_param(rngs, (D, values), ("embed", "heads"), std, dtype)
        self.rate = normal_param(rngs, (D, N), ("embed", "heads"), std, dtype)
        self.out = normal_param(rngs, (values, D), ("heads", "embed"), std, dtype)
        if not config.has_convs:
            return
        self.look_back = config.rule.num_taps - 1
        if config.rule.conv_init == "previous":
            self.key = param(self.query[...], ("embed", "heads"))
        self.query_conv = self._init_conv(rngs, keys)
        self.key_conv = self._init_conv(rngs, keys, lag=1)
        self.value_conv = self._init_conv(rngs, values)
        self.head_norm = param(jnp.ones((config.value_head_dim,), dtype), ("head_dim",))

    def _init_conv(self, rngs: nnx.Rngs, width: int, lag: int = 0) -> nnx.Param:
        """Taps [R, width] uniform in +-1/sqrt(R), as PyTorch initializes a depthwise convolution;
        or 1 at the token `lag` before."""
        shape, dtype = (self.config.rule.num_taps, width), self.config.precision.param_dtype
        bound = shape[0] ** -0.5
        taps = jax.random.uniform(rngs.params(), shape, dtype, -bound, bound)
        if self.config.rule.conv_init == "previous":
            taps = jnp.zeros_like(taps).at[-1 - lag].set(1)
        return param(taps, ("taps", "heads"), is_operand=False)

    def forward(self, x: Hidden, row: Row, student: Hidden | None = None) -> tuple[Hidden, None]:
        q, writes = self._operands(x, self._convolved(self._project(x), row.segment_ids))
        o, _ = over_rows(self._memory(), q, writes, row.segment_ids, length=x.shape[1])
        return self._project_out(x, o), None

    def start(self, batch_size: int, max_length: int | None = None) -> DeltaState:
        """The state before rows begin; its size does not depend on `max_length`."""
        config = self.config
        heads = batch_size, config.num_heads, config.head_dim, config.value_head_dim
        h = jax.ShapeDtypeStruct((batch_size, 1, config.dim), jnp.float32)
        tail = no_tail(jax.eval_shape(self._project, h), self.look_back)
        return DeltaState(jnp.zeros(heads, config.precision.state_dtype), tail)

    def extend(
        self, x: Hidden, piece: Piece, state: DeltaState, student: Hidden | None = None
    ) -> tuple[Hidden, DeltaState]:
        """(output, the state after the piece). Padding neither writes nor forgets."""
        channels = self._project(x)
        around, tail = after_tail(state.tail, channels), next_tail(state.tail, channels, piece)
        around = self._convolved(around, None)
        q, writes = self._operands(x, jax.tree.map(lambda c: c[:, -x.shape[1] :], around))
        gates = zero_padding({"beta": writes.beta, "log_decay": writes.log_decay}, piece)
        memory = self._memory()
        prepared = memory.prepared(q, writes._replace(**gates), None, length=x.shape[1])
        o, after = memory.row(prepared, state.memory)
        return self._project_out(x, o), DeltaState(after, tail)

    look_back = 0  # tokens before its own that a convolution reads

    def log_decay(self, h: Hidden) -> Float[Array, "B T N"] | None:
        """g <= 0; None: nothing is forgotten."""
        return None

    def normed(self, h: Hidden, o: Float[Array, "B T N X"]) -> Float[Array, "B T N X"]:
        if not self.config.has_convs:
            return o
        return rms_norm(o, self.head_norm[...], self.config.norm_eps)

    def _convolved(self, channels: Channels, segment_ids: Int[Array, "B T"] | None) -> Channels:
        """q, k, v [B, T, ...] after convolution and activation."""
        if not self.config.has_convs:
            return channels
        taps = (self.query_conv, self.key_conv, self.value_conv)
        q, k, v = (
            jax.nn.silu(_convolved_rows(x, w[...], segment_ids))
            for x, w in zip(channels, taps, strict=True)
        )
        return q, k, v

    def _project_out(self, h: Hidden, o: Float[Array, "B T N X"]) -> Hidden:
        flat = self.normed(h, o).reshape(*o.shape[:2], -1)
        return linear(flat, self.out[...], self.config.precision.compute_dtype)

    def _memory(self) -> DeltaMemory:
        return DeltaMemory(self.config.rule.chunk_size, self.config.precision.state_dtype)

    def _project(self, h: Hidden) -> Channels:
        dtype = self.config.precision.compute_dtype
        q, k, v = (linear(h, w[...], dtype) for w in (self.query, self.key, self.value))
        return q, k, v

    def _operands(
        self, h: Hidden, channels: Channels
    ) -> tuple[Float[Array, "B T N H"], DeltaWrites]:
        """(operand of the reads, operands of the writes); q and k have unit length per head."""
        heads = self.config.num_heads
        q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in channels)
        beta = jax.nn.sigmoid(self.per_head(h, self.rate))
        writes = DeltaWrites(l2_normalize_inside(k), v, beta, self.log_decay(h))
        return l2_normalize_inside(q), writes

    def per_head(self, h: Hidden, weight: nnx.Param) -> Float[Array, "B T N"]:
        """h W for the argument of a gate, in float32 or better: gates multiply over many tokens."""
        narrow = self.config.precision.compute_dtype
        wide = jnp.promote_types(self.config.precision.state_dtype, jnp.float32)
        return product("BTD,DN->BTN", h.astype(narrow), weight[...].astype(narrow), wide)


def _convolved_rows(
    x: Float[Array, "B T X"], taps: Float[Array, "R X"], segment_ids: Int[Array, "B T"] | None
) -> Float[Array, "B T X"]:
    """The causal convolution along whole rows, which several devices may share."""

    def on_shard(
        shard: rules.Shard, x: jax.Array, taps: jax.Array, segment_ids: jax.Array | None
    ) -> jax.Array:
        length = x.shape[1]
        x, segment_ids = sequence.halo(shard, x, segment_ids, taps.shape[0] - 1)
        ids = None if segment_ids is None else segment_ids[:, None]
        return short_conv(x[:, None], taps, is_causal=True, segment_ids=ids)[:, 0, -length:]

    names = ("batch", "length", "heads")
    inputs = (names, (None, "heads"), ("batch", "length"))
    return rules.sharded(on_shard, inputs, names)(x, taps, segment_ids)


class HybridBlockConfig(BlockConfig):
    """Attention, a delta rule after it, SwiGLU."""

    order: ClassVar[dict[str, tuple[str, str]]] = {
        "mixer": BlockConfig.order["mixer"],
        "delta": ("dn_", "dn_norm.weight"),
        "mlp": BlockConfig.order["mlp"],
    }
    delta: DeltaSublayerConfig


def delta_block(
    mixer: type[DeltaNetConfig], config: registry.ModelConfig, settings: DeltaRuleConfig
) -> BlockConfig:
    part = config.part(mixer, head_dim=config.head_size, rule=settings)
    return BlockConfig(mixer=part, mlp=config.mlp())


def hybrid_block(
    sublayer: type[DeltaSublayerConfig], config: registry.ModelConfig, settings: DeltaRuleConfig
) -> BlockConfig:
    delta = config.part(sublayer, head_dim=config.head_size, rule=settings)
    return HybridBlockConfig(mixer=config.attention(), delta=delta, mlp=config.mlp())


DELTA_KEYS = (
    *registry.COMMON_KEYS,
    registry.Key("num_heads", "num_heads"),
    registry.Key("conv_size", "memory.num_taps", 4),
)
DELTA_FIXED = {"use_short_conv": True, "attn": None, "num_v_heads": None}
DELTA_FIXED |= {"conv_bias": False, "allow_neg_eigval": False}
_FIXED = {"use_gate": False, "use_beta": True, "use_output_norm": True}
_FIXED |= {"qk_norm": "l2", "qk_activation": "silu"}


def _read(source: registry.Source) -> dict[str, Any]:
    expand_k = source.positive("expand_k", 1)
    key_width = source.positive("hidden_size") * expand_k
    return {
        "head_dim": int(key_width) // source.positive("num_heads"),
        "memory.value_expansion": source.positive("expand_v", 1) / expand_k,
    }


def _write(config: registry.ModelConfig, settings: DeltaRuleConfig) -> dict[str, Any]:
    expand_k = config.width / config.dim
    return {"expand_k": expand_k, "expand_v": expand_k * settings.value_expansion}


_PURE = functools.partial(delta_block, DeltaNetConfig), "all", DeltaRuleConfig
_REFERENCE = registry.Reference(("delta_net",), DELTA_KEYS, DELTA_FIXED | _FIXED, _read, _write)
registry.register(registry.Method("deltanet", "DeltaNet", *_PURE, _REFERENCE))
_HYBRID = functools.partial(hybrid_block, DeltaSublayerConfig), "fast", DeltaRuleConfig
_BASELINE = registry.Reference(("deltanet_baseline",), registry.FAST_KEYS, registry.ATTENTION_FIXED)
registry.register(registry.Method("deltanet_hybrid", "SWA + DeltaNet", *_HYBRID, _BASELINE))
