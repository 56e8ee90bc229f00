"""Attention sinks: what a query sees besides its window.

A model that was trained with full attention gives much weight to the first tokens of a document,
which a window takes away (Xiao et al. 2024). They may stay visible, and a head may have a learned
logit b, a sink without a value, for models from scratch. From the output o of a window and its
log-sum-exp L, which every kernel returns, and the scores s_j of the sink tokens outside of it:

    out = (e^L o + sum_j e^{s_j} v_j) / (e^L + sum_j e^{s_j} + e^b)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from ttcd_kernels.dual_window.tiles import documents

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

    @property
    def is_empty(self) -> bool:
        return not self.count and self.logits is None


NO_SINKS = Sinks()


class Seen(NamedTuple):
    """Keys and values of the sink tokens of every query, or of all queries of a row (T = 1), and
    how far before the query they are."""

    keys: Float[Array, "B T n K H"]
    values: Float[Array, "B T n K H"]
    distance: Int[Array, "B T n"]


def seen_by(
    shard: rules.Shard, row: KeysValues, segment_ids: Int[Array, "B T"] | None, sinks: Sinks
) -> Seen:
    """The sink tokens of the queries of a shard, from its keys and values or those `kept`."""
    assert sinks.positions is not None
    count, (length, is_alone) = sinks.count, (row[0].shape[1], shard.size(sequence.SEQ) == 1)
    distance = sinks.positions[..., None] - jnp.arange(count)
    if sinks.kept is not None or (segment_ids is None and is_alone):
        keys, values = (_first(x, count)[:, None] for x in sinks.kept or row)
        return Seen(keys, values, distance)
    ids = jnp.zeros(row[0].shape[:2], jnp.int32) if segment_ids is None else segment_ids
    start, offset = documents(ids).start[..., None], jnp.arange(count)
    begun, num_begun, continues = _from_left(shard, row, ids, start[:, -1:], count)
    is_continued = (start == 0) & continues[:, None, None]
    earlier = num_begun[:, None, None]
    index = jnp.where(offset < earlier, offset, count + offset - earlier)
    index = jnp.where(is_continued, index, count + start + offset)
    index = jnp.minimum(index, count + length - 1)  # of tokens that no query sees

    def chosen(begun: jax.Array, x: jax.Array) -> jax.Array:
        return jax.vmap(lambda x, index: x[index])(jnp.concatenate([begun, x], 1), index)

    keys, values = (chosen(*pair) for pair in zip(begun, row, strict=True))
    return Seen(keys, values, distance)


def _from_left(
    shard: rules.Shard, row: KeysValues, ids: jax.Array, start: jax.Array, count: int
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """(first `count` keys and values of the document that is open where the shard begins, how many
    of them are there, whether it goes on in the shard)."""
    start, length = start[:, 0, 0], ids.shape[1]
    is_same = (sequence.left_segment(shard, ids) == ids[:, 0]) & (shard.index(sequence.SEQ) > 0)
    last = jax.tree.map(
        lambda x: jax.vmap(lambda x, start: _first(jnp.roll(x, -start, 0)[None], count)[0])(
            x, start
        ),
        row,
    )
    element = (last, jnp.minimum(length - start, count), is_same & (start == 0))

    def combine(left: Any, right: Any) -> Any:
        (before, many, is_open), (after, more, goes_on) = left, right
        offset = jnp.arange(count)

        def appended(x: jax.Array, y: jax.Array) -> jax.Array:
            def one(x: jax.Array, y: jax.Array, many: jax.Array) -> jax.Array:
                return jnp.where((offset < many)[:, None, None], x, jnp.roll(y, many, 0))

            whole = jax.vmap(one)(x, y, many)
            return jnp.where(goes_on[:, None, None, None], whole, y)

        most = jnp.where(goes_on, jnp.minimum(many + more, count), more)
        return jax.tree.map(appended, before, after), most, goes_on & is_open

    neutral = jax.tree.map(jnp.zeros_like, element)
    begun, many, _ = sequence.exclusive_prefix(shard, element, combine, neutral)
    return begun, many, is_same


def joined(
    out: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    q: Float[Array, "B T N H"],
    seen: Seen | None,
    logits: Float[Array, " N"] | None,
    window: int | None,
) -> Float[Array, "B T N H"]:
    """The output of a window together with the sinks outside of it."""
    B, T, N, H = q.shape
    precision = "highest" if q.dtype == jnp.float32 else None
    options: Any = {"precision": precision, "preferred_element_type": lse.dtype}
    peak = lse
    if seen is not None and window is not None:
        letters, keys, values = "BTnKH", seen.keys, seen.values
        if keys.shape[1] == 1:
            letters, keys, values = "BnKH", keys[:, 0], values[:, 0]
        grouped = q.reshape(B, T, keys.shape[-2], -1, H)
        score = jnp.einsum(f"BTKGH,{letters}->BTKGn", grouped, keys, **options) * H**-0.5
        is_seen = (seen.distance >= window)[:, :, None, None]
        score = jnp.where(is_seen, score, -jnp.inf).reshape(B, T, N, -1)
        peak = jnp.maximum(peak, score.max(-1))
    if logits is not None:
        logits = logits.astype(lse.dtype)
        peak = jnp.maximum(peak, logits)
    peak = jax.lax.stop_gradient(jnp.maximum(peak, jnp.finfo(peak.dtype).min))
    own = jnp.exp(lse - peak)
    total, acc = own, own[..., None] * out
    if seen is not None and window is not None:
        weight = jnp.exp(score - peak[..., None])
        total = total + weight.sum(-1)
        grouped = weight.astype(q.dtype).reshape(B, T, keys.shape[-2], -1, weight.shape[-1])
        acc = acc + jnp.einsum(f"BTKGn,{letters}->BTKGH", grouped, values, **options).reshape(
            q.shape
        )
    if logits is not None:
        total = total + jnp.exp(logits - peak)
    total = jnp.where(total > 0, total, 1)  # of a query that sees nothing
    return (acc / total[..., None]).astype(out.dtype)


def _first(x: jax.Array, count: int) -> jax.Array:
    """The first `count` positions of x [B, S, ...], padded."""
    short = max(count - x.shape[1], 0)
    return jnp.pad(x[:, :count], ((0, 0), (0, short)) + ((0, 0),) * (x.ndim - 2))
