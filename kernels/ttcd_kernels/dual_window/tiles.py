"""The tiles of keys that a tile of queries visits, and the tiles of queries that visit a tile of
keys, in each band of distances; the begin and end of documents.

A tile is visited if it may hold a visible pair. In an *inner* tile every pair is visible: kernels
apply no mask there. The inner tiles of a query tile are contiguous; before and after them come
those that an end of the band or of a document cuts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ttcd_kernels.windows import Windows

# (min, max) distance from query to key, max excluded; equal ones are an empty band.
type Band = tuple[int, int]


def bands(windows: Windows) -> tuple[Band, Band]:
    """The near and the far band, which is empty where the windows are equal."""
    return (0, windows.student), (windows.student, windows.teacher)


class Documents(NamedTuple):
    """The document of each position."""

    ids: Int[Array, "B S"]
    start: Int[Array, "B S"]  # of its run of equal ids
    end: Int[Array, "B S"]  # the run's last position
    first_seen: Int[Array, "B S"]  # the first key that a query here may see
    last_seeing: Int[Array, "B S"]  # the last query that may see a key here


def documents(segment_ids: Int[Array, "B S"]) -> Documents:
    """The documents of rows, in int32. In a row whose ids never fall, but to 0 for padding at its
    end, a query sees its own run at most; elsewhere a document may come again, and any earlier key
    be of it."""
    ids = segment_ids.astype(jnp.int32)
    position = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    is_end = jnp.concatenate([ids[:, 1:] != ids[:, :-1], jnp.ones_like(ids[:, :1], bool)], 1)
    is_start = jnp.roll(is_end, 1, 1)  # the row's first position as well
    last = ids.shape[1] - 1
    start = jax.lax.cummax(jnp.where(is_start, position, 0), 1)
    end = jax.lax.cummin(jnp.where(is_end, position, last), 1, reverse=True)
    padded = jnp.where(ids == 0, jnp.max(ids, 1, keepdims=True, initial=0) + 1, ids)
    one, other = (jnp.all(x[:, 1:] >= x[:, :-1], 1, keepdims=True) for x in (ids, padded))
    is_ordered = one | other
    first_seen, last_seeing = jnp.where(is_ordered, start, 0), jnp.where(is_ordered, end, last)
    return Documents(ids, start, end, first_seen, last_seeing)


def visits(
    bands: Sequence[Band],
    num_queries: int,
    num_keys: int,
    block_q: int,
    block_kv: int,
    rows: Documents | None = None,
    *,
    by_key: bool = False,
) -> Int[Array, "B tiles bands 4"]:
    """Of each tile of queries, for B rows or all alike (B = 1), in int32: start, inner start, inner
    stop and stop of the key tiles that it visits; of each tile of keys (`by_key`) those of the
    query tiles that visit it. The queries are the last of the positions. Rows after the last query
    count as seeing every key: they are zeros, and add nothing."""
    halo = num_keys - num_queries
    begin, block = (0, block_kv) if by_key else (halo, block_q)
    first = jnp.arange(begin, num_keys, block, dtype=jnp.int32)[None]
    last = jnp.minimum(first + block, num_keys) - 1
    # The keys that a query of the tile may see and those that all see (by_key: the queries that may
    # see a key of it and those that see all) start (stop) here.
    seen = clear = jnp.full_like(first, num_keys - 1 if by_key else 0)
    if rows is not None:
        seen = rows.last_seeing[:, last[0]] if by_key else rows.first_seen[:, first[0]]
        clear = rows.end[:, first[0]] if by_key else rows.start[:, last[0]]
    filled = -(-num_queries // block_q) * block_q  # rows of all tiles
    size = block_q if by_key else block_kv

    def band(nearest: int, reach: int) -> jax.Array:
        """From spans of positions the tiles with any of `whole`, those with nothing but `inner`."""
        if by_key:
            whole = first + nearest - halo, jnp.minimum(last + reach - 1, seen) + 1 - halo
            stop = jnp.minimum(first + reach - 1, clear) + 1 - halo
            inner = last + nearest - halo, jnp.where(stop >= num_queries, filled, stop)
        else:
            whole = jnp.maximum(first - reach + 1, seen), last - nearest + 1
            inner = jnp.maximum(last - reach + 1, clear), first - nearest + 1
        begin = jnp.maximum(whole[0], 0)
        start = begin // size
        stop = jnp.where((begin < whole[1]) & (nearest < reach), -(-whole[1] // size), start)
        inner_stop = jnp.clip(inner[1] // size, start, stop)
        inner_start = jnp.clip(-(-inner[0] // size), start, inner_stop)
        return jnp.stack(jnp.broadcast_arrays(start, inner_start, inner_stop, stop), -1)

    return jnp.stack([band(*x) for x in bands], 2)
