"""Decode attention in XLA: one masked score matrix, both windows' weights in one product with V.

Products are multiplications and sums: on a CPU a matrix product first transposes the cache, whose
heads lie inside its slots. (Two cores, float32, B 4, W 2048, 24 heads of 64: 36 ms and 3 MiB of
temporaries against 127 ms and 97 MiB.)
"""

import jax
import jax.numpy as jnp

from ttcd_kernels.decode.reference import rings, visible_slots


def decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    position: jax.Array,
    page_table: jax.Array | None,
    teacher_window: int,
    student_window: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Same contract as `reference.decode`. Axis X: the teacher's window, the student's."""
    state = jnp.promote_types(q.dtype, jnp.float32)
    k, v = rings(k_cache, page_table), rings(v_cache, page_table)
    (B, N, H), (W, K) = q.shape, k.shape[1:3]
    q_BKGH = q.reshape(B, K, N // K, H).astype(state)
    score_BSKG = (q_BKGH[:, None] * k[:, :, :, None].astype(state)).sum(-1) * scale
    windows = teacher_window, student_window
    visible_BSX = jnp.stack([visible_slots(position, W, window) for window in windows], axis=-1)
    score_BSKXG = jnp.where(visible_BSX[:, :, None, :, None], score_BSKG[:, :, :, None], -jnp.inf)
    peak = score_BSKXG.max(1)
    shift = jnp.where(jnp.isneginf(peak), 0, peak)  # a row without a visible slot has weights of 0
    weight = jnp.exp(score_BSKXG - shift[:, None])
    total = weight.sum(1)
    out = (weight[..., None] * v[:, :, :, None, None].astype(state)).sum(1)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = shift + jnp.log(total)
    teacher, student = (out[:, :, x].reshape(q.shape).astype(q.dtype) for x in range(2))
    teacher_lse, student_lse = (lse[:, :, x].reshape(B, N) for x in range(2))
    return teacher, student, teacher_lse, student_lse
