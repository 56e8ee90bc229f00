"""The ideal IP-TTCD MLP: a SwiGLU whose down projection descends the distillation loss itself.

Where `ipttcd` approximates (errors against the base weight, convolutions, P, beta, normalised
keys), this follows the paper's eq. inplace_update_sw to the letter, at the price of a loop over
chunks that no prefix sum replaces. It is what Proposition 1 speaks of.
"""

import dataclasses

from flax import nnx

from ttcd_jax.config import Config
from ttcd_jax.layers.memory import InPlaceConfig, MemoryMLP, Remembered
from ttcd_jax.layers.mlp import MLPConfig
from ttcd_jax.sharding.recurrent import running_memory
from ttcd_jax.ttt.chunking import to_chunks
from ttcd_jax.ttt.running import ideal_memory


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
        memory, dtype = self.memory, self.config.precision.state_dtype
        features = tuple(to_chunks(self.features(h), memory.chunk_size) for h in (x, t))

        def make(features, w_base, mask):
            z, z_student = features
            return ideal_memory(z, z_student, w_base, mask, eta=memory.eta, state_dtype=dtype)

        w_base = self.down[...].astype(features[0].dtype)
        row = segment_ids, x.shape[1], memory.chunk_size
        return Remembered(*running_memory(make, features, w_base, *row))
