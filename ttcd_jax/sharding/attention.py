"""Attention windows across the devices that share a row: a halo of keys, not a ring.

A query sees at most window - 1 keys in front of its device's part. They come from the left, from as
many neighbours as they stand on, whatever the length of the row. Only full attention wants all of
them. Heads are independent: no traffic along `tensor`.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from ttcd_jax.errors import UserError
from ttcd_jax.sharding import rules, sequence

_QUERIES = ("batch", "length", "heads", None)
_KEYS = ("batch", "length", "kv_heads", None)


def over_parts(
    attend: Callable[..., Any],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    window: int | None,
    num_outputs: int,
) -> Any:
    """attend(q, k, v, segment_ids) for rows that lie on several devices; the outputs [B, T, N, H]
    are those of one. `window` is the widest that `attend` uses, None: all keys.

    Raises `UserError` when `tensor` does not divide the kv heads.
    """
    if not rules.is_distributed():
        return attend(q, k, v, segment_ids)
    num_heads, parts = k.shape[2], rules.axis_size("tensor")
    if num_heads % parts:
        raise UserError(
            f"{num_heads} kv heads do not divide among {parts} devices of mesh axis tensor: lower "
            "MeshConfig.tensor"
        )

    def on_part(q, k, v, segment_ids):
        batch, length = q.shape[:2]
        before = (sequence.num_parts() - 1) * length
        size = before if window is None else min(window - 1, before)
        if size:
            k, v = (sequence.with_halo(x, size) for x in (k, v))
            segment_ids = sequence.segments_with_halo(segment_ids, length, batch, size)
        return attend(q, k, v, segment_ids)

    ids = None if segment_ids is None else ("batch", "length")
    outputs = (_QUERIES,) * num_outputs if num_outputs > 1 else _QUERIES
    return rules.sharded(on_part, (_QUERIES, _KEYS, _KEYS, ids), outputs)(q, k, v, segment_ids)


def convolved_row(
    convolve: Callable[..., Array],
    x: Float[Array, "B T X"],
    taps: Float[Array, "R X"],
    segment_ids: Int[Array, "B T"] | None,
) -> Float[Array, "B T X"]:
    """convolve(x, taps, segment_ids), a causal convolution along rows that lie on several devices,
    whose channels are heads."""
    if not rules.is_distributed():
        return convolve(x, taps, segment_ids)

    def on_part(x, taps, segment_ids):
        batch, length = x.shape[:2]
        size = min(taps.shape[0] - 1, (sequence.num_parts() - 1) * length)
        if size:
            x = sequence.with_halo(x, size)
            segment_ids = sequence.segments_with_halo(segment_ids, length, batch, size)
        return convolve(x, taps, segment_ids)[:, size:]

    names = ("batch", "length", "heads")
    ids = None if segment_ids is None else ("batch", "length")
    return rules.sharded(on_part, (names, (None, "heads"), ids), names)(x, taps, segment_ids)
