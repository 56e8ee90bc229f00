"""Gated DeltaNet: DeltaNet that forgets at its own rate and gates its output.

    g = -exp(decay_log) softplus(h W_decay + decay_bias)    log decay per token and head
    y = (RMSNorm(delta_rule(q, k, v, beta, g)) * silu(h W_gate)) W_out

(Yang et al., "Gated delta networks: improving Mamba2 with delta rule").
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.axes import param
from ttcd_jax.methods.delta_net import DeltaNet, DeltaNetConfig, DeltaState
from ttcd_jax.nn.linear import linear, normal_param
from ttcd_jax.nn.stream import Piece


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(DeltaNetConfig):
    """The fields of DeltaNet; the gates have no switches."""


class GatedDeltaNet(DeltaNet):
    """h [B, T, D] -> [B, T, D]. Parameters of DeltaNet plus two gates.

    The start is Mamba2's: exp(decay_log) uniform in (0, 16), softplus(decay_bias) log-uniform in
    (0.001, 0.1).
    """

    def __init__(self, config: GatedDeltaNetConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        D, N, std = config.dim, config.num_heads, config.init_std
        dtype = config.precision.param_dtype
        self.decay = normal_param(rngs, (D, N), ("embed", "heads"), std, dtype)
        values = N * config.value_head_dim
        self.gate = normal_param(rngs, (D, values), ("embed", "heads"), std, dtype)
        # At least the smallest float: log 0 would stay -inf forever.
        speed = jax.random.uniform(
            rngs.params(), (N,), minval=np.finfo(np.float32).tiny, maxval=16.0
        )
        self.decay_log = param(jnp.log(speed).astype(dtype), ("heads",))
        step = jnp.exp(
            jax.random.uniform(rngs.params(), (N,), minval=np.log(0.001), maxval=np.log(0.1))
        )
        softplus_inverse = step + jnp.log(-jnp.expm1(-step))
        self.decay_bias = param(softplus_inverse.astype(dtype), ("heads",))

    def __call__(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """`positions` are part of every mixer's call; the delta rule knows order without them."""
        o = self._read(h, self._convolved(h, segment_ids), segment_ids, self.log_decay(h))
        return self._gated(h, o)

    def extend(
        self, h: Float[Array, "B T D"], piece: Piece, state: DeltaState
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """The same for a piece of a row of one document: (output, the state behind it)."""
        channels, tail = self._convolved_piece(h, piece, state)
        o, memory = self._read_piece(h, channels, piece, state, self.log_decay(h))
        return self._gated(h, o), DeltaState(memory, tail)

    def _gated(self, h, o) -> Float[Array, "B T D"]:
        gate = jax.nn.silu(linear(h, self.gate[...], self.config.precision.compute_dtype))
        return self._project_out(self._normed(o) * gate.reshape(o.shape))

    def log_decay(self, h: Float[Array, "B T D"]) -> Float[Array, "B T N"]:
        """g <= 0, in float32 or better."""
        x = self._per_head(h, self.decay)
        speed = jnp.exp(self.decay_log[...].astype(x.dtype))
        return -speed * jax.nn.softplus(x + self.decay_bias[...].astype(x.dtype))
