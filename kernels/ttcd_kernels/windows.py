"""The two sliding windows of an attention call over the same keys."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

# The operands of dual-window attention.
Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B S K H"]
Ids = Int[Array, "B S"]
# Those of decode attention.
Query = Float[Array, "B N H"]
Cache = Float[Array, "B W K H"]
Position = Int[Array, " B"]
# (teacher out, student out, teacher lse, student lse); in decode attention without the axis T
Outs = Float[Array, "B *T N H"]
Lses = Float[Array, "B *T N"]
type Results = tuple[Outs, Outs, Lses, Lses]


class Windows(NamedTuple):
    """Windows count the query itself; scores are multiplied by `scale`. Static in a call."""

    teacher: int
    student: int
    scale: float

    def within(self, num_keys: int) -> "Windows":
        """The windows, no longer than the keys."""
        return Windows(min(self.teacher, num_keys), min(self.student, num_keys), self.scale)


def checked(
    teacher: int | None, student: int | None, scale: float | None, num_keys: int, head_dim: int
) -> Windows:
    """The windows of a call over `num_keys`, None: all; `scale` defaults to head_dim**-0.5. Raises
    `ValueError` for a window that is not an integer of at least 1, for a student's wider than the
    teacher's, and for a scale that is not finite."""
    for name, window in (("teacher_window", teacher), ("student_window", student)):
        if window is not None and (not isinstance(window, int | np.integer) or window < 1):
            raise ValueError(
                f"{name} is {window}: a window counts the query itself, an integer of at least 1"
            )
    if teacher is not None and (student is None or student > teacher):
        raise ValueError(
            f"student_window {student} is wider than teacher_window {teacher}: "
            "the student must see no more than the teacher"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale {scale} is not finite")
    teacher, student = (num_keys if width is None else width for width in (teacher, student))
    return Windows(teacher, student, float(head_dim**-0.5) if scale is None else scale)


def check_operands(axes: str, **arrays: Shaped[Array, "..."]) -> None:
    """Raises `ValueError` for queries of these axes, keys and values (by name, in this order) that
    do not fit each other."""
    (_, q), (k_name, k), (v_name, v) = arrays.items()
    for (name, x), wanted in zip(arrays.items(), (axes, "B S K H", "B S K H"), strict=True):
        if not hasattr(x, "dtype") or x.ndim != len(wanted.split()):
            got = getattr(x, "shape", type(x).__name__)
            raise ValueError(f"{name} is {got}: it must be an array [{wanted}]")
    dtypes = [x.dtype for x in (q, k, v)]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(dtypes[0], jnp.floating):
        found = ", ".join(map(str, dtypes))
        raise ValueError(f"{', '.join(arrays)} are {found}: they must be of one floating dtype")
    if k.shape != v.shape:
        raise ValueError(f"{k_name} has shape {k.shape} and {v_name} {v.shape}: they must be equal")
    if q.shape[-1] != k.shape[3] or not k.shape[3]:
        raise ValueError(f"q {q.shape} and {k_name} {k.shape} differ in head dimension, or have 0")
    if not k.shape[2] or q.shape[-2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} kv heads do not divide {q.shape[-2]} query heads")
