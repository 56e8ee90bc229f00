"""Dual-window attention from two calls of any single-window attention that returns its log-sum-exp.

The far band of a query, w_S <= i - j < w_T, is a plain window of w_T - w_S keys for a query moved
w_S positions back. With the student's window it adds up to the teacher's:

    (o_S, L_S) = attend(q, k, v, w_S),   (o_F, L_F) = attend(q[w_S:], k[:-w_S], v[:-w_S], w_T - w_S)
    L_T = log(e^L_S + e^L_F),            o_T = e^(L_S - L_T) o_S + e^(L_F - L_T) o_F

so both outputs cost the products of the teacher's window alone. The gradients are the fused ones
(`triton_call.gradients`): stock ones take both windows and drop the log-sum-exps' cotangents.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ttcd_kernels.dual_window import cudnn, triton_call, xla
from ttcd_kernels.dual_window.cotangents import with_gradients
from ttcd_kernels.windows import Results, Windows

# (q [B, T, N, H], k, v [B, S, K, H], window, scale) -> (out [B, T, N, H], lse [B, T, N] float32):
# causal, the queries the last T of S positions, the window counting the query itself.
type SingleWindow = Callable[
    [jax.Array, jax.Array, jax.Array, int, float], tuple[jax.Array, jax.Array]
]


def of_own(dual_window: Callable[..., Any]) -> SingleWindow:
    """A dual-window implementation of this package as a single-window one: no far band."""

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, window: int, scale: float
    ) -> tuple[jax.Array, jax.Array]:
        _, out, _, lse = dual_window(q, k, v, None, Windows(window, window, scale))
        return out, lse

    return attend


def best_single_window(q: jax.Array, k: jax.Array, v: jax.Array) -> SingleWindow:
    """cuDNN's if it takes these arrays, else this package's own."""
    if cudnn.unsupported(q, k, v) is None:
        return cudnn.attend
    runs_triton = triton_call.unsupported(q, k, v) is None
    return of_own(triton_call.dual_window if runs_triton else xla.dual_window)


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: Any = None) -> str | None:
    """The reason why this implementation cannot take these arrays; None if it can."""
    return None if segment_ids is None else "documents (segment_ids) are not supported"


def merge(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax results over disjoint sets of keys, outs [X, ..., H] and lses [X, ...], -> (out, lse)
    over all, in float32 or wider. An empty set has lse -inf and any finite out. Differentiable
    where no set is empty."""
    wide = jnp.promote_types(lses.dtype, jnp.float32)
    peak = lses.astype(wide).max(0)
    shift = jnp.where(jnp.isneginf(peak), 0, peak)
    weight = jnp.exp(lses.astype(wide) - shift)
    total = weight.sum(0)
    out = (weight[..., None] * outs.astype(wide)).sum(0)
    return out / jnp.where(total > 0, total, 1)[..., None], shift + jnp.log(total)


def dual_window(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: None,
    windows: Windows,
    attend: SingleWindow | None = None,
) -> Results:
    """All four results of the call, without documents; differentiable. `attend` is called
    twice and need not be differentiable; the default is `best_single_window`."""
    forward = functools.partial(_forward, best_single_window(q, k, v) if attend is None else attend)
    windows = windows.within(k.shape[1])
    return with_gradients(forward, triton_call.gradients, windows, q, k, v, segment_ids)


def _forward(
    attend: SingleWindow, windows: Windows, q: jax.Array, k: jax.Array, v: jax.Array, *_: Any
) -> Results:
    teacher_window, student_window, scale = windows
    student, student_lse = attend(q, k, v, student_window, scale)
    # The queries that have a far band, and the keys that it may reach.
    num_keys = k.shape[1] - student_window
    num_rows = min(q.shape[1], num_keys)
    if teacher_window == student_window or num_rows <= 0:
        return student, student, student_lse, student_lse
    far, far_lse = attend(
        q[:, -num_rows:], k[:, :num_keys], v[:, :num_keys], teacher_window - student_window, scale
    )
    teacher, teacher_lse = merge(
        jnp.stack([student[:, -num_rows:], far]), jnp.stack([student_lse[:, -num_rows:], far_lse])
    )

    def whole(rows: jax.Array, near: jax.Array) -> jax.Array:
        """All rows of the teacher: those without a far band equal the student's."""
        return jnp.concatenate([near[:, :-num_rows], rows.astype(near.dtype)], axis=1)

    return whole(teacher, student), student, whole(teacher_lse, student_lse), student_lse
