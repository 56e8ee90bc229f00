"""The definitions of the kernels' ops, slow and obvious: full masks and loops in plain jnp.

The contract of each is that of the public call in the op's `api`; the arguments are those of its
implementations.
"""

import jax
import jax.numpy as jnp
from ttcd_kernels.normalize import NORM_EPS
from ttcd_kernels.windows import Windows


def single_window(q, k, v, segment_ids, window: int, scale: float):
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


def dual_window(q, k, v, segment_ids, windows: Windows):
    """(teacher out, student out, teacher lse, student lse), each by its own full softmax, in the
    operands' dtype throughout."""
    teacher, teacher_lse = single_window(q, k, v, segment_ids, windows.teacher, windows.scale)
    if windows.student == windows.teacher:
        return teacher, teacher, teacher_lse, teacher_lse
    student, student_lse = single_window(q, k, v, segment_ids, windows.student, windows.scale)
    return teacher, student, teacher_lse, student_lse


def decode(q, k_cache, v_cache, position, windows: Windows):
    """(teacher out, student out, teacher lse, student lse), each by its own softmax over the whole
    cache, in float32 or wider."""
    state = jnp.promote_types(q.dtype, jnp.float32)
    k, v = (cache.astype(state) for cache in (k_cache, v_cache))
    group = q.shape[1] // k.shape[2]
    k_BSNH, v_BSNH = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    score = jnp.einsum("BNH,BSNH->BNS", q.astype(state), k_BSNH, precision="highest")
    score = score * windows.scale
    # Slot s holds the position `distance` before the query's, if it was ever written.
    distance = (position[:, None] - jnp.arange(k.shape[1])) % k.shape[1]

    def softmax(window: int):
        visible = ((distance < window) & (distance <= position[:, None]))[:, None]
        lse = jax.nn.logsumexp(score, axis=-1, where=visible)
        weight = jnp.where(visible, jnp.exp(score - lse[..., None]), 0)
        out = jnp.einsum("BNS,BSNH->BNH", weight, v_BSNH, precision="highest")
        return out.astype(q.dtype), lse

    (teacher, teacher_lse), (student, student_lse) = map(softmax, windows[:2])
    return teacher, student, teacher_lse, student_lse


def short_conv(x, taps, segment_ids, is_causal: bool):
    """x [B, C, L, F], taps [R, F], segment_ids [B, C, L] -> y [B, C, L, F]: a loop over taps."""
    R, L = taps.shape[0], x.shape[2]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.zeros(x.shape, wide)
    for r in range(R):
        source = jnp.arange(L) - ((R - 1 if is_causal else R // 2) - r)
        is_read = (source >= 0) & (source < L)
        source = source.clip(0, L - 1)
        if segment_ids is not None:
            is_read = is_read & (segment_ids[:, :, source] == segment_ids)
        moved = jnp.where(is_read[..., None], x[:, :, source], 0)
        y = y + moved.astype(wide) * taps[r].astype(wide)
    return y.astype(x.dtype)


def short_conv_residual(
    z_teacher, z_student, teacher_taps, student_taps, *, segment_ids, is_causal, normalizes_keys
):
    """(difference, target, key) in z's dtype. Gradients by autodiff, so right only where no student
    vector is zero: `zero_slope` applies there, and is not used here."""
    target = short_conv(z_teacher, teacher_taps, segment_ids, is_causal)
    student = short_conv(z_student, student_taps, segment_ids, is_causal)
    key = student
    if normalizes_keys:
        wide = student.astype(jnp.promote_types(student.dtype, jnp.float32))
        norm = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
        key = (wide / jnp.maximum(norm, NORM_EPS)).astype(student.dtype)
    return target - student, target, key
