"""Attention sinks: what a query sees besides its window.

A model that was trained with full attention gives much weight to the first tokens of a document,
which a window takes away (Xiao et al. 2024). They may stay visible, and a head may have a learned
logit b, a sink without a value, for models from scratch. From the output o of a window and its
log-sum-exp L, which every kernel returns, and the scores s_j of the sink tokens outside of it:

    out = (e^L o + sum_j e^{s_j} v_j) / (e^L + sum_j e^{s_j} + e^b)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_jax.sharding import rules, sequence

KeysValues = tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]


class Sinks(NamedTuple):
    """The first `count` tokens of every document, and a learned logit per head. `positions`: of
    the queries in their documents. `kept`: keys and values of the tokens, in rows of one document
    each; None: they are among the keys of the row."""

    count: int = 0
    positions: Int[Array, "B T"] | None = None
    logits: Float[Array, " N"] | None = None
    kept: KeysValues | None = None


NO_SINKS = Sinks()


class Seen(NamedTuple):
    """Keys and values of the sink tokens of every query, or of all queries of a row, and how far
    before the query they are."""

    keys: Float[Array, "B *T n K H"]
    values: Float[Array, "B *T n K H"]
    distance: Int[Array, "B T n"]


def seen_by(
    shard: rules.Shard, row: KeysValues, segment_ids: Int[Array, "B T"] | None, sinks: Sinks
) -> Seen | None:
    """The sink tokens of the queries of a shard, from its keys and values or those `kept`; None
    without any."""
    if not (count := sinks.count):
        return None
    assert sinks.positions is not None
    offset, length = jnp.arange(count), row[0].shape[1]
    distance = sinks.positions[..., None] - offset
    if sinks.kept is not None or (segment_ids is None and shard.size(sequence.SEQ) == 1):
        keys, values = (_first(x, count) for x in sinks.kept or row)
        return Seen(keys, values, distance)
    place = jnp.arange(length)[:, None] - distance  # in the shard; below 0 to the left of it
    begun = _from_left(shard, row, place[:, 0])
    index = jnp.where(place < 0, offset, count + place)
    index = jnp.minimum(index, count + length - 1)  # of tokens that no query sees
    whole = (jnp.concatenate(pair, 1) for pair in zip(begun, row, strict=True))
    keys, values = (jax.vmap(lambda x, index: x[index])(x, index) for x in whole)
    return Seen(keys, values, distance)


def _from_left(shard: rules.Shard, row: KeysValues, place: Int[Array, "B n"]) -> list[jax.Array]:
    """The keys and values [B, n, K, H] at a `place` to the left of the shard; 0 where it is not.
    Every device sends every other what that one needs."""
    parts, (B, length), n = shard.size(sequence.SEQ), row[0].shape[:2], place.shape[1]
    if parts == 1:
        return [jnp.zeros((B, n, *x.shape[2:]), x.dtype) for x in row]
    begin = shard.index(sequence.SEQ) * length
    here = jax.lax.all_gather(place + begin, sequence.SEQ) - begin  # [devices, B, n]
    is_here = ((here >= 0) & (here < length))[..., None, None]

    def received(x: jax.Array) -> jax.Array:
        found = jax.vmap(lambda x, at: x[at], (0, 1), 1)(x, jnp.clip(here, 0, length - 1))
        return jax.lax.all_to_all(jnp.where(is_here, found, 0), sequence.SEQ, 0, 0).sum(0)

    return [*map(received, row)]


def joined(
    outputs: Sequence[Any],
    windows: tuple[int | None, ...],
    q: Float[Array, "B T N H"],
    seen: Seen | None,
    logits: Float[Array, " N"] | None,
) -> tuple[Float[Array, "B T N H"], ...]:
    """The output of each window together with the sinks outside of it; `outputs`: those of a
    teacher's and a student's window, then their log-sum-exps."""
    found = [*zip(outputs[:2], outputs[2:], strict=True)][-len(windows) :]
    if seen is None and logits is None:
        return tuple(out for out, _ in found)
    pairs = zip(found, windows, strict=True)
    return tuple(_joined(*x, q, seen, logits, window) for x, window in pairs)


def _joined(
    out: jax.Array,
    lse: Float[Array, "B T N"],
    q: jax.Array,
    seen: Seen | None,
    logits: jax.Array | None,
    window: int | None,
) -> jax.Array:
    precision = "highest" if q.dtype == jnp.float32 else None
    options: Any = {"precision": precision, "preferred_element_type": lse.dtype}
    scores, num_seen, values = [lse[..., None]], 0, None
    if seen is not None and window is not None:
        keys, values, distance = seen
        num_seen, letters = distance.shape[-1], "BTnKH" if keys.ndim == 5 else "BnKH"
        grouped = q.reshape(*q.shape[:2], keys.shape[-2], -1, q.shape[-1])
        score = jnp.einsum(f"BTKGH,{letters}->BTKGn", grouped, keys, **options)
        is_seen = (distance >= window)[:, :, None]
        score = score.reshape(*lse.shape, num_seen) * q.shape[-1] ** -0.5
        scores.append(jnp.where(is_seen, score, -jnp.inf))
    if logits is not None:
        scores.append(jnp.broadcast_to(logits.astype(lse.dtype), lse.shape)[..., None])
    score = jnp.concatenate(scores, -1)
    peak = jnp.maximum(score.max(-1, keepdims=True), jnp.finfo(score.dtype).min)
    weight = jnp.exp(score - jax.lax.stop_gradient(peak))
    acc, total = weight[..., :1] * out, weight.sum(-1, keepdims=True)
    if values is not None:
        grouped = weight[..., 1 : 1 + num_seen].astype(q.dtype)
        grouped = grouped.reshape(*q.shape[:2], values.shape[-2], -1, num_seen)
        beside = jnp.einsum(f"BTKGn,{letters}->BTKGH", grouped, values, **options)
        acc = acc + beside.reshape(q.shape)
    return (acc / jnp.where(total > 0, total, 1)).astype(out.dtype)  # 0: a query that sees nothing


def _first(x: jax.Array, count: int) -> jax.Array:
    """The first `count` positions of x [B, S, ...], padded."""
    short = max(count - x.shape[1], 0)
    return jnp.pad(x[:, :count], ((0, 0), (0, short)) + ((0, 0),) * (x.ndim - 2))
