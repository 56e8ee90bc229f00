"""The ideal IP-TTCD MLP: a SwiGLU whose down projection descends the distillation loss itself.

Where `ipttcd` approximates (errors against the base weight, convolutions, P, beta, normalised
keys), this follows the paper's eq. inplace_update_sw to the letter, at the price of a loop over
chunks that no prefix sum replaces. It is what Proposition 1 speaks of.
"""

import dataclasses

from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.layers.memory import MemoryStats, memory_stats
from ttcd_jax.layers.mlp import MLPConfig, SwiGLU
from ttcd_jax.ttt.chunking import from_chunks, memory_mask, to_chunks
from ttcd_jax.ttt.running import ideal_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdealMemoryConfig(Config):
    """`eta` multiplies the mean over a chunk: eta / chunk_size per token, where `MemoryConfig.eta`
    multiplies the sum."""

    chunk_size: int = 1024
    eta: float = 0.3
    resets_at_document: bool = True

    def validate(self) -> None:
        if self.chunk_size < 1:
            raise UserError(f"IdealMemoryConfig.chunk_size {self.chunk_size} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdealConfig(Config):
    """An MLP with the ideal memory in its down projection."""

    mlp: MLPConfig
    memory: IdealMemoryConfig = IdealMemoryConfig()


class IdealMLP(SwiGLU):
    """(x, t) [B, T, D] -> y [B, T, D], any T. The parameters of SwiGLU and no others."""

    def __init__(self, config: IdealConfig, *, rngs: nnx.Rngs):
        super().__init__(config.mlp, rngs=rngs)
        self.memory = config.memory

    def __call__(
        self,
        x: Float[Array, "B T D"],
        t: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        return self.forward(x, t, segment_ids)[0]

    def forward(
        self,
        x: Float[Array, "B T D"],
        t: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], MemoryStats]:
        """y, the teacher's features read through the running weight, and what the memory holds."""
        memory, length = self.memory, x.shape[1]
        if not memory.resets_at_document:
            segment_ids = None
        z_teacher, z_student = (to_chunks(self.features(h), memory.chunk_size) for h in (x, t))
        y, state = ideal_memory(
            z_teacher,
            z_student,
            self.down[...].astype(z_teacher.dtype),
            memory_mask(segment_ids, length, memory.chunk_size),
            eta=memory.eta,
            state_dtype=self.config.precision.state_dtype,
        )
        return from_chunks(y, length), memory_stats(state, self.down[...], memory.eta)
