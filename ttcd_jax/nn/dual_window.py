"""One QKV projection under two windows: a long one for the teacher, a short one for the student."""

import dataclasses
from typing import ClassVar

from flax import nnx

from ttcd_jax.config import Positive
from ttcd_jax.errors import UserError
from ttcd_jax.nn.attention import Attention, AttentionConfig
from ttcd_jax.nn.block import Dims, Names, SublayerConfig, Views
from ttcd_jax.nn.windows import Outputs, Windows


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualWindowConfig(SublayerConfig):
    """`attention.window` is the teacher's window."""

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

    @property
    def dims(self) -> Dims:
        return self.attention

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
        self.student_window = config.student_window

    @property
    def windows(self) -> Windows:
        return self.config.window, self.student_window

    def _out(self, seen: Outputs) -> Views:
        teacher, student = seen
        return Views(self.project_out(teacher), self.project_out(student))
