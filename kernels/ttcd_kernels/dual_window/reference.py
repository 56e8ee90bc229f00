"""The definition of dual-window attention: full masks, plain jnp, the compute dtype throughout.

For a window w, query t (position i among the S keys) sees key j when 0 <= i - j < w and both belong
to one segment:

    lse_t = log sum_j exp(scale * q_t . k_j),    out_t = sum_j exp(scale * q_t . k_j - lse_t) v_j

O(T * S) bytes: tests and small experiments only.
"""

import jax
import jax.numpy as jnp

from ttcd_kernels.windows import Results, Windows


def single_window(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    window: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """q [B, T, N, H], k and v [B, S, K, H] -> out [B, T, N, H], log-sum-exp [B, T, N]."""
    B, T, N, H = q.shape
    S, K = k.shape[1], k.shape[2]
    q_BTKGH = q.reshape(B, T, K, N // K, H)
    score = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k, precision="highest") * scale
    query_pos, key_pos = jnp.arange(T)[:, None] + (S - T), jnp.arange(S)[None, :]
    visible = (query_pos >= key_pos) & (query_pos - key_pos < window)
    if segment_ids is not None:
        same = segment_ids[:, S - T :, None] == segment_ids[:, None, :]
        visible = visible & same[:, None, None]
    score = jnp.where(visible, score, -jnp.inf)
    lse = jax.nn.logsumexp(score, axis=-1)
    weight = jnp.exp(score - lse[..., None])
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weight, v, precision="highest").reshape(B, T, N, H)
    return out, lse.transpose(0, 3, 1, 2).reshape(B, T, N)


def dual_window(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, windows: Windows
) -> Results:
    """(teacher out, student out, teacher lse, student lse), each by its own full softmax."""
    teacher, teacher_lse = single_window(q, k, v, segment_ids, windows.teacher, windows.scale)
    if windows.student == windows.teacher:
        return teacher, teacher, teacher_lse, teacher_lse
    student, student_lse = single_window(q, k, v, segment_ids, windows.student, windows.scale)
    return teacher, student, teacher_lse, student_lse
