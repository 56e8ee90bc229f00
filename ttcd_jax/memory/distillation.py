"""Context distillation, measured: the gap between student and teacher, and the rest of it with a
memory (docs/evaluation_memory.md).

With the features z_T and z_S that the layer's error compares (`InPlaceMLP.views`), W_base and the
running weight W_i of a token's chunk,

    y_T = z_T W_base,  y_S = z_S W_base (memory off),  y = z_S W_i (memory on)

z_T and z_S are after their convolutions, before keys are normalized, whatever the layer itself
reads. Gate, P, normalization and eta are in W_i. A memory of the stream (`ipttcd_stream`) moves the
student's stream towards a teacher's that reads nothing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ttcd_jax.memory.chunks import memory_mask


class Distillation(NamedTuple):
    """Of every token: lengths of vectors [D], and whether and where the memory moves the student.
    Arrays [B, T] in float32 or wider, of a model [Y, B, T] with Y the layers that have a teacher.
    """

    teacher: Float[Array, "..."]  # |y_T|
    off: Float[Array, "..."]  # |y_T - y_S|
    on: Float[Array, "..."]  # |y_T - y|
    both: Float[Array, "..."]  # |z_T W_i - z_S W_i|
    change: Float[Array, "..."]  # |z_out (W_i - W_base)|, z_out the features that the layer reads
    # Whether an earlier chunk has a token of its document, and neither |y_T - y_S| nor |y - y_S| is
    # rounding.
    is_moved: Bool[Array, "..."]
    cosine: Float[Array, "..."]  # of y - y_S and y_T - y_S; 0 where it is not moved
    windows: Float[Array, "..."]  # |z_out (W_i - W_i without what the windows make of the errors)|


def distances(
    y_teacher: Float[Array, "B C L D"],
    y_student: Float[Array, "B C L D"],
    y: Float[Array, "B C L D"],
    both: Float[Array, "B C L D"],
    change: Float[Array, "B C L D"],
    *,
    windows: Float[Array, "B C L D"],
    segments: Int[Array, "B C L"] | None,
    power: float = 1.0,
) -> Distillation:
    """The measures of rows by chunk, [B, C, L]. `both` is (z_T - z_S) W_i, `change` the memory's
    addition to the layer's output, `windows` the part of it that goes with the gap; without
    `segments` a row is one document. A move of eps to this `power`, relative, is rounding."""
    wide, eps = jnp.promote_types(y.dtype, jnp.float32), jnp.finfo(y.dtype).eps
    length, (_, C, L, _) = functools.partial(jnp.linalg.norm, axis=-1), y.shape
    teacher, student, y = (x.astype(wide) for x in (y_teacher, y_student, y))
    gap, move = teacher - student, y - student
    size, off, step = length(teacher), length(gap), length(move)
    is_moved = (off > eps**0.5 * size) & (step > eps**power * length(student))
    is_moved &= (jnp.arange(C) > 0)[:, None]
    if segments is not None:
        is_moved &= memory_mask(segments, C * L, L).reads
    cosine = jnp.sum(gap * move, axis=-1) / jnp.where(is_moved, off * step, 1)
    lengths = (length(x.astype(wide)) for x in (teacher - y, both, change, windows))
    on, both, change, windows = lengths
    cosine = jnp.where(is_moved, cosine, 0)
    return Distillation(size, off, on, both, change, is_moved, cosine, windows)


def summary(
    found: Distillation, counted: Bool[Array, "B T"] | None = None
) -> dict[str, Float[Array, " Y"]]:
    """Measures of every layer over the tokens `counted` (None: all).

    `gap`, `gap_on`, `gap_both`, `change`: means relative to |y_T|, where it is not zero. `cosine`,
    and `closer`, the share that comes closer to the teacher: over tokens that the memory moves.
    `loss`, `loss_on`: L_CD, half the mean square. `window_share`: of what is read, |what a memory
    would lack whose student sees what the teacher sees|^2 / |change|^2. NaN where no token is left.
    """
    counts = jnp.ones(found.teacher.shape[1:], bool) if counted is None else counted
    counts = jnp.broadcast_to(counts, found.teacher.shape)
    has_teacher = counts & (found.teacher > 0)
    relative = 1 / jnp.where(has_teacher, found.teacher, 1)

    def mean(x: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.mean(x, axis=(1, 2), where=where)

    return {
        "gap": mean(found.off * relative, has_teacher),
        "gap_on": mean(found.on * relative, has_teacher),
        "gap_both": mean(found.both * relative, has_teacher),
        "cosine": mean(found.cosine, counts & found.is_moved),
        "closer": mean((found.on < found.off).astype(found.on.dtype), counts & found.is_moved),
        "change": mean(found.change * relative, has_teacher),
        "loss": mean(found.off**2 / 2, counts),
        "loss_on": mean(found.on**2 / 2, counts),
        "window_share": mean(found.windows**2, counts) / mean(found.change**2, counts),
    }
