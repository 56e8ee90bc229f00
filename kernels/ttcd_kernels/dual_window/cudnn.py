"""One sliding window by cuDNN's fused attention, with its log-sum-exp in float32.

`jax.nn.dot_product_attention` rounds the log-sum-exp to the output's dtype, an error of 3 % in a
merge; the function that it calls does not.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ttcd_kernels import launch

_MAX_HEAD_DIM = {80: 128, 90: 256}  # by compute capability


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array) -> str | None:
    """The reason why cuDNN cannot take these arrays on this machine; None if it can."""
    reason = launch.unsupported(("bfloat16", "float16"), q=q, k=k, v=v)
    gpu = launch.capability(q, k, v)
    if reason is not None or gpu is None:
        return reason
    widest = _MAX_HEAD_DIM[max(known for known in _MAX_HEAD_DIM if known <= gpu)]
    if q.shape[-1] % 8 or q.shape[-1] > widest:
        return f"head dim {q.shape[-1]} is not a multiple of 8 up to {widest}"
    return None


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int, scale: float
) -> tuple[jax.Array, jax.Array]:
    """`lse.SingleWindow` by cuDNN: (out [B, T, N, H], lse [B, T, N] float32)."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    T, S = q.shape[1], k.shape[1]
    # cuDNN counts queries from the first key, we from the last: padding aligns them.
    q = jnp.pad(q, ((0, 0), (S - T, 0), (0, 0), (0, 0)))
    attention: Any = dot_product_attention  # the type of its result depends on its arguments
    out, lse = attention(
        q,
        k,
        v,
        scale=scale,
        mask_type=MaskType.CAUSAL,
        sliding_window_length=window if window < S else None,
        return_residual=True,
    )
    return out[:, S - T :], lse.swapaxes(1, 2)[:, S - T :]
