"""What the kernels have to compute, in float64 NumPy: a softmax for each window, each with its own
gradient, head by head. No code is shared with any implementation."""

import itertools
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from ttcd_kernels.windows import Windows

type Arrays = tuple[Any, ...]
_ROWS = 512  # queries at a time
NAMES = ("teacher", "student", "teacher_lse", "student_lse", "dq", "dk", "dv")


def dual_window(
    q: Float[np.ndarray, "B T N H"],
    k: Float[np.ndarray, "B S K H"],
    v: Float[np.ndarray, "B S K H"],
    *cotangents: Float[np.ndarray, "..."],
    ids: Int[np.ndarray, "B S"] | None,
    windows: Windows,
) -> Arrays:
    """The results, and the gradients of their sum weighted by `cotangents`: as `NAMES`."""
    teacher, student = (
        _window(q, k, v, ids, window, windows.scale, *cotangents[i::2])
        for i, window in enumerate(windows[:2])
    )
    results = itertools.chain(*zip(teacher[:2], student[:2], strict=True))
    return *results, *(a + b for a, b in zip(teacher[2:], student[2:], strict=True))


def _window(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    ids: np.ndarray | None,
    window: int,
    scale: float,
    d_out: np.ndarray,
    d_lse: np.ndarray,
) -> Arrays:
    """(out, lse, dq, dk, dv). The queries are the last T of the S positions."""
    (B, T, N, _), (S, K) = q.shape, k.shape[1:3]
    out, lse, dq, dk, dv = (np.zeros(x.shape) for x in (q, q[..., 0], q, k, v))
    for b, n, start in itertools.product(range(B), range(N), range(0, T, _ROWS)):
        i = np.arange(start, min(start + _ROWS, T))
        j = np.arange(max(i[0] + S - T - window + 1, 0), i[-1] + S - T + 1)
        distance = (i + S - T)[:, None] - j
        visible = (distance >= 0) & (distance < window)
        if ids is not None:
            visible &= ids[b, i + S - T][:, None] == ids[b, j]
        query, d_result = q[b, i, n], d_out[b, i, n]
        m = n // (N // K)
        key, value = k[b, j, m], v[b, j, m]
        score = np.where(visible, query @ key.T * scale, -np.inf)
        peak = score.max(1, keepdims=True)
        weight = np.exp(score - peak)
        total = weight.sum(1, keepdims=True)
        weight /= total
        out[b, i, n], lse[b, i, n] = weight @ value, (peak + np.log(total))[:, 0]
        delta = (d_result * out[b, i, n]).sum(1) - d_lse[b, i, n]
        d_score = weight * (d_result @ value.T - delta[:, None]) * scale
        dq[b, i, n] = d_score @ key
        dk[b, j, m] += d_score.T @ query
        dv[b, j, m] += weight.T @ d_result
    return out, lse, dq, dk, dv


def short_conv_residual(
    z_teacher: Float[np.ndarray, "B C L F"],
    z_student: Float[np.ndarray, "B C L F"],
    teacher_taps: Float[np.ndarray, "R F"],
    student_taps: Float[np.ndarray, "R F"],
    *cotangents: Float[np.ndarray, "B C L F"],
    ids: Int[np.ndarray, "B C L"] | None,
    before: int,
    normalizes: bool,
    zero_slope: float = 1.0,
) -> Arrays:
    """(difference, target, key), and the gradients of z and taps, teacher's first: tap r of a token
    is `before` - r tokens earlier."""
    d_difference, d_target, d_key = cotangents

    def tapped(r: int, x: np.ndarray, is_back: bool = False) -> np.ndarray:
        """Row t + r - before of x at t, zero in another chunk or segment; or the transposed."""
        L, moved = x.shape[2], np.zeros_like(x)
        for t in range(max(before - r, 0), min(L, L + before - r)):
            there = t + r - before
            same = np.ones(x.shape[:2]) if ids is None else ids[:, :, t] == ids[:, :, there]
            to, source = (there, t) if is_back else (t, there)
            moved[:, :, to] = x[:, :, source] * same[..., None]
        return moved

    def pulled(z: np.ndarray, taps: np.ndarray, d: np.ndarray) -> Arrays:
        dz = sum(tapped(r, d, is_back=True) * tap for r, tap in enumerate(taps))
        return dz, np.stack([(tapped(r, z) * d).sum((0, 1, 2)) for r in range(len(taps))])

    target = sum(tapped(r, z_teacher) * tap for r, tap in enumerate(teacher_taps))
    student = sum(tapped(r, z_student) * tap for r, tap in enumerate(student_taps))
    key, d_student = student, d_key
    if normalizes:
        norm = np.linalg.norm(student, axis=-1, keepdims=True)
        key = student / np.maximum(norm, 1e-6)
        across = d_key - key * (key * d_key).sum(-1, keepdims=True)
        d_student = np.where(norm > 1e-6, across / np.maximum(norm, 1e-6), zero_slope * d_key)
    dz_teacher, d_teacher_taps = pulled(z_teacher, teacher_taps, d_difference + d_target)
    dz_student, d_student_taps = pulled(z_student, student_taps, d_student - d_difference)
    return target - student, target, key, dz_teacher, dz_student, d_teacher_taps, d_student_taps


def decode(
    q: Float[np.ndarray, "B N H"],
    k_cache: Float[np.ndarray, "B W K H"],
    v_cache: Float[np.ndarray, "B W K H"],
    position: Int[np.ndarray, " B"],
    windows: Windows,
) -> Arrays:
    """The results; without a position 0 and -inf."""
    (B, N, _), (W, K) = q.shape, k_cache.shape[1:3]
    outs, lses = np.zeros((2, *q.shape)), np.full((2, B, N), -np.inf)
    for (i, window), b, n in itertools.product(enumerate(windows[:2]), range(B), range(N)):
        slots = (position[b] - np.arange(min(window, position[b] + 1))) % W
        if len(slots):
            score = k_cache[b, slots, n // (N // K)] @ q[b, n] * windows.scale
            weight = np.exp(score - score.max())
            lses[i, b, n] = score.max() + np.log(weight.sum())
            outs[i, b, n] = weight / weight.sum() @ v_cache[b, slots, n // (N // K)]
    return *outs, *lses
