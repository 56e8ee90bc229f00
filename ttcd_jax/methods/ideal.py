"""The ideal IP-TTCD MLP: a SwiGLU whose down projection descends the distillation loss itself.

Where `ipttcd` approximates (errors against the base weight, convolutions, P, beta, normalised
keys), this follows the paper's eq. inplace_update_sw to the letter, at the price of a loop over
chunks that no prefix sum replaces. It is what Proposition 1 speaks of.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from ttcd_jax.config import Config
from ttcd_jax.memory.chunks import to_chunks
from ttcd_jax.memory.running import chunked_memory, ideal_memory, ideal_rule
from ttcd_jax.methods.in_place import InPlaceConfig, MemoryMLP, Remembered
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.sharding.recurrent import running_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdealMemoryConfig(InPlaceConfig):
    """`eta` multiplies the mean over a chunk: eta / chunk_size per token, where `MemoryConfig.eta`
    multiplies the sum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdealConfig(Config):
    """An MLP with the ideal memory in its down projection."""

    mlp: MLPConfig
    memory: IdealMemoryConfig = IdealMemoryConfig()


class IdealMLP(MemoryMLP):
    """(x, t) [B, T, D] -> y [B, T, D], any T: teacher and student. y is the teacher's features read
    through the running weight. The parameters of SwiGLU and no others."""

    def __init__(self, config: IdealConfig, *, rngs: nnx.Rngs):
        super().__init__(config.mlp, config.memory, rngs=rngs)

    def _remember(self, x, t, segments, segment_ids) -> Remembered:
        memory = self.memory
        features = tuple(to_chunks(x, memory.chunk_size) for x in self._tokens(x, t))
        w_base = self.down[...].astype(features[0].dtype)
        row = segment_ids, x.shape[1], memory.chunk_size
        dtype = self.config.precision.state_dtype

        def make(features, w_base, mask):
            z, z_student = features
            return ideal_memory(z, z_student, w_base, mask, eta=memory.eta, state_dtype=dtype)

        return Remembered(*running_memory(make, features, w_base, *row))

    def _tokens(self, x, t):
        return self.features(x), self.features(t)

    def _operands(self, convolved):
        return convolved[0], convolved

    def _chunked(self, batch_size: int):
        w_base = self.down[...].astype(self.config.precision.compute_dtype)
        dtype = self.config.precision.state_dtype
        rule = ideal_rule(w_base, eta=self.memory.eta, state_dtype=dtype)

        def write(state, features):
            return rule.write(state, (*features, jnp.ones(features[0].shape[:2], bool)))

        return chunked_memory(rule)._replace(write=write), rule.start(batch_size)
