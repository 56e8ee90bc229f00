"""Public entry points of dual-window attention, which check shapes and windows."""

from typing import Literal, TypedDict, Unpack

import jax.numpy as jnp

from ttcd_kernels.dispatch import Candidate, choose
from ttcd_kernels.dual_window import lse, mosaic_call, triton_call, xla
from ttcd_kernels.windows import Ids, Keys, Queries, Results, check_operands, checked

Implementation = Literal["auto", "triton", "mosaic", "lse", "xla"]
# "auto" takes the first that can run and needs no check, or has had it; nothing behind "xla".
CANDIDATES = {
    "mosaic": Candidate(mosaic_call.dual_window, mosaic_call.unsupported, needs_check=True),
    "triton": Candidate(triton_call.dual_window, triton_call.unsupported, needs_check=True),
    "xla": Candidate(xla.dual_window),
    "lse": Candidate(lse.dual_window),
}


def dual_window_attention_with_lse(
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    teacher_window: int | None,
    student_window: int | None,
    segment_ids: Ids | None = None,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Results:
    """Causal attention under two sliding windows: (teacher, student [B, T, N, H], teacher lse,
    student lse [B, T, N]) of q [B, T, N, H], k and v [B, S, K, H], segment_ids [B, S].

    The queries are the last T of the S positions (the first S - T keys are halo). A window w
    counts the query itself, `None` sees everything: the query at position i sees key j when
    0 <= i - j < w and both belong to one segment. With the sums over those keys

        lse_i = log sum_j exp(scale * q_i . k_j),  out_i = sum_j exp(scale * q_i . k_j - lse_i) v_j

    A number of v that is not finite reaches every query that its tile of keys is computed for, also
    those before it and of other segments: it is multiplied by their weight, 0.

    `scale` defaults to H**-0.5. Query head n reads kv head n // (N / K). Log-sum-exps are float32
    (float64 for float64 inputs). Differentiable in q, k, v through all four results, at five matrix
    products per query-key pair of the teacher's window (seven in the kernels: two, no atomics).
    `implementation`:

        triton  a fused kernel: one sweep, GPUs of compute capability 8.0 and up, head dims 32, 64,
                128, and 80 and 96, padded to 128 inside the kernel: 128/80 = 1.6 and 128/96 = 1.33
                times the products, no more bytes of device memory
        mosaic  the same for Hopper alone (wgmma, TMA): 16-bit operands, head dims 64, 128, scale
                > 0
        lse     two calls of a stock attention, joined through their log-sum-exps: of cuDNN on a GPU
                (16-bit operands, no segment_ids, head dims of 8 n up to 128, on Hopper 256), else
                of xla; the gradients are those of triton or xla, as auto chooses
        xla     blocks of queries, O(T * window) bytes, on any device
        auto    mosaic, else triton, where it can run and has been checked (`python -m
                ttcd_kernels.check`), else xla

    Raises `ValueError` for shapes or windows that do not fit, naming both numbers, and for an
    implementation that cannot take them here.
    """
    check_operands("B T N H", q=q, k=k, v=v)
    (S, H), ids = k.shape[1::2], segment_ids
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in batch")
    if q.shape[1] > S:
        raise ValueError(f"{q.shape[1]} queries need at least as many keys, got {S}")
    if ids is not None and (ids.shape != k.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer)):
        raise ValueError(
            f"segment_ids {ids.dtype} {ids.shape} must be int and match the keys, {k.shape[:2]}"
        )
    windows = checked(teacher_window, student_window, scale, S, H).within(S)
    if not q.size:
        sums = jnp.zeros(q.shape[:3], jnp.promote_types(q.dtype, jnp.float32))
        return jnp.zeros_like(q), jnp.zeros_like(q), sums, sums
    operands = q, k, v, segment_ids, windows
    return choose("dual-window attention", implementation, CANDIDATES, *operands)(*operands)


class _Options(TypedDict, total=False):
    """Options shared by all calls, as in `dual_window_attention_with_lse`."""

    segment_ids: Ids | None
    scale: float | None
    implementation: Implementation


class DualOptions(_Options):
    """Options of a call with two windows."""

    teacher_window: int | None
    student_window: int | None


def dual_window_attention(
    q: Queries, k: Keys, v: Keys, **options: Unpack[DualOptions]
) -> tuple[Queries, Queries]:
    """(teacher, student) outputs of `dual_window_attention_with_lse`."""
    return dual_window_attention_with_lse(q, k, v, **options)[:2]


def window_attention(
    q: Queries, k: Keys, v: Keys, *, window: int | None, **options: Unpack[_Options]
) -> Queries:
    """Causal attention under one sliding window: the dual call with an empty far band."""
    windows: DualOptions = {"teacher_window": window, "student_window": window, **options}
    return dual_window_attention(q, k, v, **windows)[1]
