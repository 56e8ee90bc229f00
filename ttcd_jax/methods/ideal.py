"""The ideal IP-TTCD MLP: a SwiGLU whose down projection descends the distillation loss itself, by
the paper's eq. inplace_update_sw to the letter, at the price of a loop over chunks that no prefix
sum replaces. Proposition 1 is about this layer."""

import functools
from typing import ClassVar

from jaxtyping import Array, Float

from ttcd_jax.memory.running import IdealMemory, Views
from ttcd_jax.methods.in_place import InPlaceConfig, InPlaceMLP, InPlaceSettings
from ttcd_jax.methods.ipttcd import dual_window_block
from ttcd_jax.methods.registry import Method, register
from ttcd_jax.nn.row import Hidden


class IdealMemoryConfig(InPlaceSettings):
    """`eta` multiplies the mean over a chunk: eta / chunk_size per token, where `MemoryConfig.eta`
    multiplies the sum."""

    stores_keys: ClassVar[bool] = False


class IdealConfig(InPlaceConfig):
    """An MLP with the ideal memory in its down projection."""

    has_teacher: ClassVar[bool] = True
    memory: IdealMemoryConfig = IdealMemoryConfig()

    def flops(self, length: int) -> int | float:
        """Besides a SwiGLU: student gate and up, both sides of the error, delta_w; W is read
        instead of W_base."""
        return (3 + 5) * self.mlp.unit_flops(length)


class IdealMLP(InPlaceMLP[Views, Views], config=IdealConfig):
    """(x, t) [B, T, D] -> y [B, T, D], any T: teacher and student. y is the teacher's features read
    through the running weight. The parameters of SwiGLU and no others."""

    def tokens(self, x: Hidden, t: Hidden) -> Views:
        return self.features(x), self.features(t)

    def operands(self, convolved: Views) -> tuple[Float[Array, "B C L F"], Views]:
        return convolved[0], convolved

    def views(self, convolved: Views) -> Views:
        return convolved

    def memory(self, length: int) -> IdealMemory:
        return IdealMemory(self.w_base(), self.settings.eta, self.config.precision.state_dtype)


_BLOCK = functools.partial(dual_window_block, IdealConfig)
register(Method("ipttcd_ideal", "ideal IP-TTCD", _BLOCK, settings=IdealMemoryConfig))
