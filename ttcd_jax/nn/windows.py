"""Attention under one or two causal windows, over whole rows and over pieces of them, with sinks.

On several devices along `seq` a query sees at most window - 1 keys before its device's part: a halo
from the neighbors, not a ring, whatever the length of the row. Only full attention needs all keys.
Heads are independent: no traffic along `tensor`.

A model that was trained with full attention gives much weight to the first tokens of a document,
which a window takes away (Xiao et al. 2024). They may stay visible, from no farther than a bound,
below which the rotary embedding is known to the model. A head may have a learned logit b, a sink
without a value, for models from scratch. From the output o of a window and its log-sum-exp L, which
every kernel returns, and the scores s_j of the sink tokens outside of it:

    out = (e^L o + sum_j e^{s_j} v_j) / (e^L + sum_j e^{s_j} + e^b)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from ttcd_kernels.decode import api as decode
from ttcd_kernels.dual_window.api import Implementation, dual_window_attention_with_lse

from ttcd_jax.errors import UserError
from ttcd_jax.nn.row import Piece, after_tail, scatter
from ttcd_jax.sharding import rules, sequence

# The widest first; None: full attention.
Windows = tuple[int | None] | tuple[int | None, int]
Outputs = tuple[Float[Array, "B T N H"], ...]
KeysValues = tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]
# Keys and values of the sink tokens of every query, or of all queries of a row, and how far before
# the query they are.
_Seen = tuple[Float[Array, "B *T n K H"], Float[Array, "B *T n K H"], Int[Array, "B Q n"]]


class Sinks(NamedTuple):
    """The first `count` tokens of every document, and a learned logit per head. `offsets`: of
    the queries into their documents. `kept`: keys and values of the tokens, in rows of one document
    each; None: they are among the keys of the row. `queries`: as they see the tokens outside of
    their windows, None: as they see all others."""

    count: int = 0
    offsets: Int[Array, "B T"] | None = None
    logits: Float[Array, " N"] | None = None
    kept: KeysValues | None = None
    queries: Float[Array, "B T N H"] | None = None


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segment_ids: Int[Array, "B S"] | None,
    windows: Windows,
    implementation: Implementation,
    sinks: Sinks,
) -> Outputs:
    """The output of each window, with the `sinks` beside it; the queries are the last T of the S
    positions. Raises `UserError` when `tensor` does not divide the kv heads."""
    num_heads, parts = k.shape[2], rules.axis_size("tensor")
    if num_heads % parts:
        raise UserError(
            f"{num_heads} kv heads do not divide among {parts} devices of mesh axis tensor: lower "
            "MeshConfig.tensor"
        )

    def on_shard(shard: rules.Shard, q: jax.Array, *operands: Any) -> Outputs:
        k, v, segment_ids, *beside = operands
        own = Sinks(sinks.count, *beside)
        reach = None if windows[0] is None else windows[0] - 1
        keys_values, ids = sequence.halo(shard, (k, v), segment_ids, reach)
        options: Any = {"segment_ids": ids, "implementation": implementation}
        options |= {"teacher_window": windows[0], "student_window": windows[-1]}
        outputs = dual_window_attention_with_lse(q, *keys_values, **options)
        return _joined(outputs, windows, q, _seen(shard, (k, v), segment_ids, own), own)

    queries, keys = (("batch", "length", heads) for heads in ("heads", "kv_heads"))
    kept, tokens = ("batch", None, "kv_heads"), ("batch", "length")
    names = (queries, keys, keys, tokens, tokens, ("heads",), kept, queries)
    run = rules.sharded(on_shard, names, (queries,) * len(windows))
    return run(q, k, v, segment_ids, *sinks[1:])


class KVCache(NamedTuple):
    """Keys and values of the positions that attention may still see, a ring per row: position p is
    in slot p mod W. `sinks`: those of the first positions, where a window leaves them behind."""

    keys: Float[Array, "B W K H"]
    values: Float[Array, "B W K H"]
    sinks: KeysValues | None = None

    def axes(self) -> "KVCache":
        names: Any = ("batch", None, "kv_heads", None)
        return KVCache(names, names, self.sinks and (names, names))

    def kinds(self) -> dict[str, "KVCache"]:
        return {"attention": self}


def attend_cached(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    piece: Piece,
    cache: KVCache,
    windows: Windows,
    implementation: Implementation,
    sinks: Sinks,
) -> tuple[Outputs, KVCache]:
    """(the output of each window, the cache after the piece): `attend` over both. Under full
    attention the output is NaN at a token that the cache has no slot for."""
    if windows[0] is None:
        offset, slots = jnp.arange(q.shape[1]), cache.keys.shape[1]
        is_lost = (piece.positions(q.shape[1]) >= slots) & (offset < piece.lengths[:, None])
        q = jnp.where(is_lost[..., None, None], jnp.nan, q)
    after = _appended(cache, k, v, piece)
    if sinks.count:
        first = after.sinks or (after.keys[:, : sinks.count], after.values[:, : sinks.count])
        sinks = sinks._replace(kept=first)
    if q.shape[1] == 1:
        slots = cache.keys.shape[1]
        # A kernel for long rows (mosaic) has no form for one query.
        has_form = implementation in get_args(decode.Implementation)
        chosen: Any = implementation if has_form else "auto"
        wide, narrow = (min(x or slots, slots) for x in (windows[0], windows[-1]))
        operands = q[:, 0], *after[:2], piece.start + piece.lengths - 1
        outputs = decode.decode_attention_with_lse(
            *operands, teacher_window=wide, student_window=narrow, implementation=chosen
        )
        seen = _seen(rules.Shard(), after[:2], None, sinks)
        return _joined([x[:, None] for x in outputs], windows, q, seen, sinks), after
    piece = piece.under(windows[0])
    ids, keys, values = None, k, v
    if piece.halo:  # the positions before the piece, in order
        slots = (piece.start[:, None] + jnp.arange(-piece.halo, 0)) % cache.keys.shape[1]
        halo = jax.vmap(lambda row, slots: tuple(x[slots] for x in row))(cache[:2], slots)
        keys, values = after_tail(halo, (k, v))
    if piece.has_gap:
        # Slots that were never written are one more document.
        positions = piece.start[:, None] + jnp.arange(-piece.halo, k.shape[1])
        ids = (positions >= 0).astype(jnp.int32)
    return attend(q, keys, values, ids, windows, implementation, sinks), after


def _appended(cache: KVCache, k: jax.Array, v: jax.Array, piece: Piece) -> KVCache:
    slots = cache.keys.shape[1]
    offset = jnp.arange(k.shape[1])
    is_kept = (offset < piece.lengths[:, None]) & (offset >= piece.lengths[:, None] - slots)
    positions, sinks = piece.positions(k.shape[1]), cache.sinks
    targets = jnp.where(is_kept, positions % slots, slots)
    if sinks is not None:
        most = sinks[0].shape[1]
        first = jnp.where(offset < piece.lengths[:, None], jnp.minimum(positions, most), most)
        sinks = scatter(sinks[0], k, first), scatter(sinks[1], v, first)
    return KVCache(scatter(cache.keys, k, targets), scatter(cache.values, v, targets), sinks)


def _seen(
    shard: rules.Shard, row: KeysValues, segment_ids: Int[Array, "B T"] | None, sinks: Sinks
) -> _Seen | None:
    """The sink tokens of the queries of a shard, from its keys and values or those `kept`."""
    if not (count := sinks.count):
        return None
    assert sinks.offsets is not None
    offset, length = jnp.arange(count), row[0].shape[1]
    distance = sinks.offsets[..., None] - offset
    if sinks.kept is not None or (segment_ids is None and shard.size(sequence.SEQ) == 1):
        padding = (0, 0), (0, count), (0, 0), (0, 0)  # of shorter rows
        keys, values = (jnp.pad(x[:, :count], padding)[:, :count] for x in sinks.kept or row)
        return keys, values, distance
    place = jnp.arange(length)[:, None] - distance  # in the shard; below 0 to the left of it
    begun = _from_left(shard, row, place[:, 0])
    index = jnp.where(place < 0, offset, count + place)
    index = jnp.minimum(index, count + length - 1)  # of tokens that no query sees
    whole = (jnp.concatenate(pair, 1) for pair in zip(begun, row, strict=True))
    keys, values = (jax.vmap(lambda x, index: x[index])(x, index) for x in whole)
    return keys, values, distance


def _from_left(shard: rules.Shard, row: KeysValues, place: Int[Array, "B n"]) -> list[jax.Array]:
    """The keys and values [B, n, K, H] at a `place` to the left of the shard; 0 where it is not."""
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


def _joined(
    outputs: Sequence[Any],
    windows: Windows,
    q: Float[Array, "B T N H"],
    seen: _Seen | None,
    sinks: Sinks,
) -> Outputs:
    """The output of each window together with the sinks outside of it; `outputs`: those of a
    teacher's and a student's window, then their log-sum-exps."""
    logits, q = sinks.logits, q if sinks.queries is None else sinks.queries
    found = [*zip(outputs[:2], outputs[2:], strict=True)][-len(windows) :]
    if seen is None and logits is None:
        return tuple(out for out, _ in found)
    precision = "highest" if q.dtype == jnp.float32 else None

    def one(out: jax.Array, lse: jax.Array, window: int | None) -> jax.Array:
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
        # The total is 0 for a query that sees nothing.
        return (acc / jnp.where(total > 0, total, 1)).astype(out.dtype)

    return tuple(one(*x, window) for x, window in zip(found, windows, strict=True))
