"""One QKV projection under two windows: a long one for the teacher, a short one for the student."""

import dataclasses

from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels import dual_window_attention

from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.nn.attention import Attention, AttentionConfig
from ttcd_jax.nn.cache import KVCache, cached_attention
from ttcd_jax.nn.stream import Piece
from ttcd_jax.sharding.attention import over_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualWindowConfig(Config):
    """`attention.window` is the teacher's window."""

    attention: AttentionConfig
    student_window: int

    def validate(self) -> None:
        teacher = self.attention.window
        if self.student_window < 1:
            raise UserError(f"student_window {self.student_window} must be at least 1")
        if teacher is not None and self.student_window > teacher:
            raise UserError(
                f"student_window {self.student_window} is wider than the teacher's window "
                f"{teacher}: give the teacher the longer one"
            )


class DualWindowAttention(Attention):
    """h [B, T, D] -> (teacher, student), both [B, T, D] behind the same output projection.

    The first `student_window` rows of a document are equal in both. Gradient flows through both.
    """

    def __init__(self, config: DualWindowConfig, *, rngs: nnx.Rngs):
        super().__init__(config.attention, rngs=rngs)
        self.student_window = config.student_window

    def __call__(
        self,
        h: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        config = self.config

        def windows(q, k, v, segment_ids):
            return dual_window_attention(
                q,
                k,
                v,
                teacher_window=config.window,
                student_window=self.student_window,
                segment_ids=segment_ids,
                implementation=config.implementation,
            )

        q, k, v = self.project(h, positions)
        teacher, student = over_parts(windows, q, k, v, segment_ids, config.window, num_outputs=2)
        return self.project_out(teacher), self.project_out(student)

    def extend(
        self, h: Float[Array, "B T D"], piece: Piece, cache: KVCache
    ) -> tuple[tuple[Float[Array, "B T D"], Float[Array, "B T D"]], KVCache]:
        """((teacher, student), the cache behind the piece)."""
        q, k, v = self.project(h, piece.positions(h.shape[1]))
        teacher, student, cache = cached_attention(
            *(q, k, v, piece, cache),
            window=self.config.window,
            student_window=self.student_window,
            implementation=self.config.implementation,
        )
        return (self.project_out(teacher), self.project_out(student)), cache
