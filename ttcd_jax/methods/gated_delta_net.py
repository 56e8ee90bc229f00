"""Gated DeltaNet: DeltaNet that forgets at its own rate and gates its output.

    g = -exp(decay_log) softplus(h W_decay + decay_bias)    log decay per token and head
    y = (RMSNorm(delta_rule(q, k, v, beta, g)) * silu(h W_gate)) W_out

(Yang et al., "Gated delta networks: improving Mamba2 with delta rule").
"""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from ttcd_jax.axes import param
from ttcd_jax.methods import delta_net
from ttcd_jax.methods.registry import Key, Method, ModelConfig, Reference, Source, register
from ttcd_jax.nn.block import Names
from ttcd_jax.nn.linear import linear, normal_param
from ttcd_jax.nn.row import Hidden


class GatedDeltaNetConfig(delta_net.DeltaNetConfig):
    """The fields of DeltaNet; the gates have no switches."""

    reference_names: ClassVar[Names] = delta_net.DeltaNetConfig.reference_names | {
        "a_proj.weight": ("decay", "linear"),
        "A_log": ("decay_log", "same"),
        "dt_bias": ("decay_bias", "same"),
        "g_proj.weight": ("gate", "linear"),
    }

    def flops(self, length: int) -> int | float:
        """Besides DeltaNet: the output gate, and sums of log decays as a product with ones."""
        chunk, N = min(self.rule.chunk_size, length), self.num_heads
        gate = 2 * length * self.dim * N * self.value_head_dim
        return super().flops(length) + gate + 2 * length * N * chunk**2


class GatedDeltaNet(delta_net.DeltaNet, config=GatedDeltaNetConfig):
    """h [B, T, D] -> [B, T, D]. Parameters of DeltaNet plus two gates. Initialized as in Mamba2:
    exp(decay_log) uniform in (0, 16), softplus(decay_bias) log-uniform in (0.001, 0.1)."""

    def __init__(self, config: GatedDeltaNetConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        D, N, std = config.dim, config.num_heads, config.init_std
        dtype = config.precision.param_dtype
        self.decay = normal_param(rngs, (D, N), ("embed", "heads"), std, dtype)
        values = N * config.value_head_dim
        self.gate = normal_param(rngs, (D, values), ("embed", "heads"), std, dtype)
        draw = functools.partial(jax.random.uniform, shape=(N,))
        # At least the smallest float: log 0 would stay -inf forever.
        speed = draw(rngs.params(), minval=np.finfo(np.float32).tiny, maxval=16.0)
        self.decay_log = param(jnp.log(speed).astype(dtype), ("heads",))
        dt = jnp.exp(draw(rngs.params(), minval=np.log(0.001), maxval=np.log(0.1)))
        softplus_inverse = dt + jnp.log(-jnp.expm1(-dt))
        self.decay_bias = param(softplus_inverse.astype(dtype), ("heads",))

    def normed(self, h: Hidden, o: Float[Array, "B T N X"]) -> Float[Array, "B T N X"]:
        gate = jax.nn.silu(linear(h, self.gate[...], self.config.precision.compute_dtype))
        return super().normed(h, o) * gate.reshape(o.shape)

    def log_decay(self, h: Hidden) -> Float[Array, "B T N"]:
        """g <= 0, in float32 or better."""
        x = self.per_head(h, self.decay)
        speed = jnp.exp(self.decay_log[...].astype(x.dtype))
        return -speed * jax.nn.softplus(x + self.decay_bias[...].astype(x.dtype))


def _read(source: Source) -> dict[str, Any]:
    return {"memory.value_expansion": source.positive("expand_v", 2)}


def _write(config: ModelConfig, settings: delta_net.DeltaRuleConfig) -> dict[str, Any]:
    return {"head_dim": config.head_size, "expand_v": settings.value_expansion}


_KEYS = (*delta_net.DELTA_KEYS, Key("head_dim", "head_dim", 256))
_FIXED = delta_net.DELTA_FIXED | {"use_gate": True}
_REFERENCE = Reference(("gated_deltanet",), _KEYS, _FIXED, _read, _write)
_PURE = functools.partial(delta_net.delta_block, GatedDeltaNetConfig), "all"
_SETTINGS = delta_net.DeltaRuleConfig
register(Method("gated_deltanet", "Gated DeltaNet", *_PURE, _SETTINGS, _REFERENCE))
_HYBRID = functools.partial(delta_net.hybrid_block, GatedDeltaNetConfig), "fast", _SETTINGS
register(Method("gated_deltanet_hybrid", "SWA + Gated DeltaNet", *_HYBRID))
