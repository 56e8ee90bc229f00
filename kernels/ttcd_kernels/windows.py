"""The two sliding windows of an attention call over the same keys."""

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


def checked(teacher: int, student: int, scale: float | None, head_dim: int) -> Windows:
    """The windows of a call; `scale` defaults to head_dim**-0.5. Raises `ValueError` for a window
    below 1, and for a student's that is wider than the teacher's."""
    for name, window in (("teacher_window", teacher), ("student_window", student)):
        if window < 1:
            raise ValueError(f"{name} is {window}: a window counts the query itself, so at least 1")
    if student > teacher:
        raise ValueError(
            f"student_window {student} is wider than teacher_window {teacher}: "
            "the student must see no more than the teacher"
        )
    return Windows(teacher, student, float(head_dim**-0.5) if scale is None else scale)
