"""Attention under one or two causal windows, over whole rows and over pieces of them.

On several devices along `seq` a query sees at most window - 1 keys before its device's part: a halo
from the neighbors, not a ring, whatever the length of the row. Only full attention needs all keys.
Heads are independent: no traffic along `tensor`.
"""

from typing import Any, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from ttcd_kernels.decode import api as decode
from ttcd_kernels.dual_window.api import Implementation, dual_window_attention_with_lse

from ttcd_jax.errors import UserError
from ttcd_jax.nn.row import Piece, after_tail, scatter
from ttcd_jax.nn.sinks import NO_SINKS, KeysValues, Sinks, joined, seen_by
from ttcd_jax.sharding import rules, sequence

# The widest first; None: full attention.
Windows = tuple[int | None] | tuple[int | None, int]
Outputs = tuple[Float[Array, "B T N H"], ...]


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segment_ids: Int[Array, "B S"] | None,
    windows: Windows,
    implementation: Implementation,
    sinks: Sinks = NO_SINKS,
) -> Outputs:
    """The output of each window, with the `sinks` beside it; the queries are the last T of the S
    positions.

    Raises `UserError` when `tensor` does not divide the kv heads.
    """
    num_heads, parts = k.shape[2], rules.axis_size("tensor")
    if num_heads % parts:
        raise UserError(
            f"{num_heads} kv heads do not divide among {parts} devices of mesh axis tensor: lower "
            "MeshConfig.tensor"
        )

    def on_shard(
        shard: rules.Shard,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        *beside: Any,
    ) -> Outputs:
        own = Sinks(sinks.count, *beside)
        reach = None if windows[0] is None else windows[0] - 1
        keys_values, ids = sequence.halo(shard, (k, v), segment_ids, reach)
        outputs = dual_window_attention_with_lse(
            q,
            *keys_values,
            teacher_window=windows[0],
            student_window=windows[-1],
            segment_ids=ids,
            implementation=implementation,
        )
        return joined(outputs, windows, q, seen_by(shard, (k, v), segment_ids, own), own.logits)

    queries, keys = (("batch", "length", heads) for heads in ("heads", "kv_heads"))
    kept, tokens = ("batch", None, "kv_heads"), ("batch", "length")
    names = (queries, keys, keys, tokens, tokens, ("heads",), kept)
    run = rules.sharded(on_shard, names, (queries,) * len(windows))
    return run(q, k, v, segment_ids, *sinks[1:])


class KVCache(NamedTuple):
    """Keys and values of the positions that attention may still see, a ring per row: position p
    is in slot p mod W. Slots that were never written are zero. `sinks`: those of the first
    positions, where a window leaves them behind."""

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
    sinks: Sinks = NO_SINKS,
) -> tuple[Outputs, KVCache]:
    """(the output of each window, the cache after the piece): `attend` over the cache and the
    piece."""
    after = _appended(cache, k, v, piece)
    if sinks.count:
        first = after.sinks or (after.keys[:, : sinks.count], after.values[:, : sinks.count])
        sinks = sinks._replace(kept=first)
    if q.shape[1] == 1:
        return _one_token(q, piece, after, windows, implementation, sinks), after
    piece.cut.check("window", windows[0])
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


def _one_token(
    q: jax.Array,
    piece: Piece,
    cache: KVCache,
    windows: Windows,
    implementation: Implementation,
    sinks: Sinks,
) -> Outputs:
    slots = cache.keys.shape[1]
    # A kernel for long rows (mosaic) has no form for one query.
    has_form = implementation in get_args(decode.Implementation)
    chosen = cast(decode.Implementation, implementation) if has_form else "auto"
    outputs = decode.decode_attention_with_lse(
        q[:, 0],
        *cache[:2],
        piece.start + piece.lengths - 1,
        teacher_window=min(windows[0] or slots, slots),
        student_window=min(windows[-1] or slots, slots),
        implementation=chosen,
    )
    seen = seen_by(rules.Shard(), cache[:2], None, sinks)
    return joined([x[:, None] for x in outputs], windows, q, seen, sinks.logits)


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
