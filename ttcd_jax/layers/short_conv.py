"""Depthwise convolution inside a chunk: zero padding at every chunk edge, nothing carried
across."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_conv(
    x: Float[Array, "B C L F"],
    taps: Float[Array, "R F"],
    *,
    is_causal: bool,
    segment_ids: Int[Array, "B C L"] | None = None,
) -> Float[Array, "B C L F"]:
    """y_c = sum_r taps[r] x_{c - shift(r)}: a cross-correlation, no kernel flip.

    Causal: shift R-1-r, the last tap is the current token. Otherwise symmetric: shift R//2 - r. A
    tap that would reach another document reads zero. Accumulated in float32 or better, returned in
    x's dtype.
    """
    R, L = taps.shape[0], x.shape[2]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    offset = R - 1 if is_causal else R // 2
    total = jnp.zeros(x.shape, wide)
    for r in range(R):
        shift = offset - r
        moved = _shift(x, shift, L)
        if segment_ids is not None and shift:
            same = _shift(segment_ids[..., None], shift, L) == segment_ids[..., None]
            moved = jnp.where(same, moved, 0)
        total = total + moved.astype(wide) * taps[r].astype(wide)
    return total.astype(x.dtype)


def _shift(x: Array, shift: int, length: int) -> Array:
    """x moved `shift` positions later along axis 2 (earlier if negative), zeros moved in."""
    front, back = max(shift, 0), max(-shift, 0)
    padded = jnp.pad(x, ((0, 0), (0, 0), (front, back), (0, 0)))
    return padded[:, :, back : back + length]
