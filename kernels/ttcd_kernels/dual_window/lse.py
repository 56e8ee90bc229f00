"""Dual-window attention out of two calls of a stock attention under one window.

The far band of the query at i, w_S <= i - j < w_T, is what a query at i - w_S sees under the window
w_T - w_S: keys, values and their documents move up by w_S positions. Its softmax joins that of the
near band through the log-sum-exps:

    o_1, L_1 = attend(q, k, v, w_S)                                   the student's
    o_2, L_2 = attend(q[w_S:], k[:-w_S], v[:-w_S], w_T - w_S)
    L = log(e^L_1 + e^L_2),  o = e^(L_1 - L) o_1 + e^(L_2 - L) o_2    the teacher's

The two calls take the products of the teacher's window. The gradients are those of the other
implementations (`cotangents.py`) and run nothing stock: a stock backward has no place for the
cotangents of log-sum-exps, and takes seven products per pair in the near band where five do.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ttcd_kernels import launch
from ttcd_kernels.dispatch import Candidate, choose
from ttcd_kernels.dual_window import triton_call, xla
from ttcd_kernels.dual_window.cotangents import with_gradients
from ttcd_kernels.windows import Ids, Keys, Lses, Outs, Queries, Results, Windows

# (q [B, T, N, H], k and v [B, S, K, H], documents of both, window, scale) -> (out [B, T, N, H], lse
# [B, T, N] in float32 or wider): causal, the queries the last T of S positions. A query that sees
# no key has a finite out, and an lse far below any.
type Stock = Callable[..., tuple[Outs, Lses]]


def dual_window(q: Queries, k: Keys, v: Keys, segment_ids: Ids | None, windows: Windows) -> Results:
    """All four results of the call, differentiable through all of them. Rounded are both calls'
    outputs, hence a 16-bit teacher twice."""
    operands = q, k, v, segment_ids
    attend = choose("attention under one window", "auto", STOCK, *operands)
    pull = choose("the gradient of attention", "auto", _GRADIENTS, *operands)
    forward = functools.partial(_forward, attend, windows)
    return with_gradients(forward, functools.partial(pull, windows), *operands)


def _forward(attend: Stock, windows: Windows, *operands: Any) -> Results:
    q, k, v, segment_ids = operands
    (w_T, w_S, scale), T = windows, q.shape[1]
    ids = xla.of_both(segment_ids, q)
    student, student_lse = attend(q, k, v, ids, w_S, scale)
    rows = min(T, k.shape[1] - w_S)  # the last, which have a far band
    if rows <= 0 or w_T == w_S:
        return student, student, student_lse, student_lse
    later = None if ids is None else (ids[0][:, -rows:], ids[1][:, :-w_S])
    far, far_lse = attend(q[:, -rows:], k[:, :-w_S], v[:, :-w_S], later, w_T - w_S, scale)
    before = (0, 0), (T - rows, 0), (0, 0)
    far_lse = jnp.pad(far_lse, before, constant_values=-jnp.inf)
    far = jnp.pad(far, (*before, (0, 0)))
    lse = jnp.logaddexp(student_lse, far_lse)
    near_share, far_share = (jnp.exp(x - lse)[..., None] for x in (student_lse, far_lse))
    return (near_share * student + far_share * far).astype(q.dtype), student, lse, student_lse


def _cudnn(q: Queries, k: Keys, v: Keys, ids: None, window: int, scale: float) -> tuple[Outs, Lses]:
    """By the function below `jax.nn.dot_product_attention`, which would round the log-sum-exp to
    the dtype of the output."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    halo, S = k.shape[1] - q.shape[1], k.shape[1]
    # cuDNN counts queries from the first key: rows before them make both counts equal.
    q = jnp.pad(q, ((0, 0), (halo, 0), (0, 0), (0, 0)))
    if scale <= 0:
        q = q * jnp.asarray(np.sign(scale), q.dtype)
    options = {"sliding_window_length": window} if window < S else {}
    options |= {"scale": abs(scale) or 1.0, "mask_type": MaskType.CAUSAL, "return_residual": True}
    attention: Any = dot_product_attention  # the type of its result depends on its options
    out, lse = attention(q, k, v, **options)
    return out[:, halo:], lse.swapaxes(1, 2)[:, halo:]


def no_cudnn(q: Queries, k: Keys, v: Keys, segment_ids: Ids | None) -> str | None:
    """The reason why cuDNN cannot take these arrays here; None if it can."""
    gpu, head_dim = launch.capability(q, k, v), q.shape[-1]
    if gpu is None or gpu < 80:
        return "there is no NVIDIA GPU of compute capability 8.0 or more"
    if segment_ids is not None:
        return "it takes no segment_ids"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q, k, v are {q.dtype}: it takes bfloat16 and float16"
    widest = 128 if gpu < 90 else 256
    if head_dim % 8 or head_dim > widest:
        return f"head dim {head_dim} is not a multiple of 8 up to {widest}"
    try:
        from jax._src.cudnn import fused_attention_stablehlo

        fused_attention_stablehlo.check_cudnn_version()
    except (ImportError, RuntimeError) as error:
        return f"JAX has none here: {error}"
    return None


STOCK = {"cudnn": Candidate(_cudnn, no_cudnn), "xla": Candidate(xla.one_window)}
_GRADIENTS = {
    "triton": Candidate(triton_call.gradients, triton_call.unsupported, needs_check=True),
    "xla": Candidate(xla.gradients),
}
