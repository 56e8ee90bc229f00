"""Decode attention in XLA: one masked score matrix, both windows' weights in one product with V.

Products are elementwise, then summed: on a CPU a matrix product first transposes the cache, whose
slots hold all heads. (Two cores, float32, B 4, W 2048, 24 heads of 64: 36 ms and 3 MiB of
temporaries against 127 ms and 97 MiB.)
"""

import jax
import jax.numpy as jnp

from ttcd_kernels.windows import Results, Windows


def visible_slots(position: jax.Array, num_slots: int, window: int) -> jax.Array:
    """[B, W]: whether a slot holds one of the last `window` positions."""
    distance = (position[:, None] - jnp.arange(num_slots)) % num_slots
    return (distance < window) & (distance <= position[:, None])


def decode(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, position: jax.Array, windows: Windows
) -> Results:
    """All four results of the call. Axis X: the teacher's window, the student's."""
    state = jnp.promote_types(q.dtype, jnp.float32)
    (B, N, H), (W, K) = q.shape, k_cache.shape[1:3]
    q_BKGH = q.reshape(B, K, N // K, H).astype(state)
    score_BSKG = (q_BKGH[:, None] * k_cache[:, :, :, None].astype(state)).sum(-1) * windows.scale
    visible = [visible_slots(position, W, window) for window in windows[:2]]
    visible_BSX = jnp.stack(visible, axis=-1)
    score_BSKXG = jnp.where(visible_BSX[:, :, None, :, None], score_BSKG[:, :, :, None], -jnp.inf)
    peak = score_BSKXG.max(1)
    shift = jnp.where(jnp.isneginf(peak), 0, peak)  # a row without a visible slot has weights of 0
    weight = jnp.exp(score_BSKXG - shift[:, None])
    total = weight.sum(1)
    out = (weight[..., None] * v_cache[:, :, :, None, None].astype(state)).sum(1)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = shift + jnp.log(total)
    teacher, student = (out[:, :, x].reshape(q.shape).astype(q.dtype) for x in range(2))
    teacher_lse, student_lse = (lse[:, :, x].reshape(B, N) for x in range(2))
    return teacher, student, teacher_lse, student_lse
