"""Two sliding windows of attention over the same keys."""

from typing import NamedTuple, Self

import jax

# (teacher out, student out, teacher lse, student lse)
type Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Windows(NamedTuple):
    """Static facts of a call: windows count the query itself; scores are multiplied by `scale`."""

    teacher: int
    student: int
    scale: float

    def within(self, num_keys: int) -> Self:
        """The windows, no longer than the keys."""
        return self._replace(
            teacher=min(self.teacher, num_keys), student=min(self.student, num_keys)
        )
