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
    """The documents of rows, in int32. In a row whose ids never fall a query sees its own run at
    most; elsewhere a document may come again, and any earlier key be of it."""
    ids = segment_ids.astype(jnp.int32)
    position = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    is_end = jnp.concatenate([ids[:, 1:] != ids[:, :-1], jnp.ones_like(ids[:, :1], bool)], 1)
    is_start = jnp.roll(is_end, 1, 1)  # the row's first position as well
    last = ids.shape[1] - 1
    start = jax.lax.cummax(jnp.where(is_start, position, 0), 1)
    end = jax.lax.cummin(jnp.where(is_end, position, last), 1, reverse=True)
    is_ordered = jnp.all(ids[:, 1:] >= ids[:, :-1], 1, keepdims=True)
    first_seen, last_seeing = jnp.where(is_ordered, start, 0), jnp.where(is_ordered, end, last)
    return Documents(ids, start, end, first_seen, last_seeing)


def key_tiles(
    bands: Sequence[Band],
    num_queries: int,
    num_keys: int,
    block_q: int,
    block_kv: int,
    rows: Documents | None = None,
) -> Int[Array, "B tiles bands 4"]:
    """Of each tile of queries, for B rows or all alike (B = 1), in int32: start, inner start, inner
    stop and stop of the key tiles that it visits. The queries are the last of the positions."""
    first = jnp.arange(num_keys - num_queries, num_keys, block_q, dtype=jnp.int32)[None]
    last = jnp.minimum(first + block_q, num_keys) - 1
    seen = clear = jnp.zeros_like(first)  # all queries of the tile see the keys from `clear` on
    if rows is not None:
        seen = rows.first_seen[:, first[0]]
        start = rows.start[:, last[0]]
        clear = jnp.where(start <= first, start, num_keys)

    def band(nearest: int, reach: int) -> jax.Array:
        whole = jnp.maximum(first - reach + 1, seen), last - nearest + 1
        inner = jnp.maximum(last - reach + 1, clear), first - nearest + 1
        return _bounds(whole, inner, block_kv, is_empty=nearest == reach)

    return jnp.stack([band(*x) for x in bands], 2)


def query_tiles(
    bands: Sequence[Band],
    num_queries: int,
    num_keys: int,
    block_q: int,
    block_kv: int,
    rows: Documents | None = None,
) -> Int[Array, "B tiles bands 4"]:
    """Of each tile of keys, for B rows or all alike (B = 1), in int32: start, inner start, inner
    stop and stop of the query tiles that visit it. Rows after the last query count as seeing every
    key: they are zeros, and add nothing."""
    first = jnp.arange(0, num_keys, block_kv, dtype=jnp.int32)[None]
    last = jnp.minimum(first + block_kv, num_keys) - 1
    halo = num_keys - num_queries
    seeing = clear = jnp.full_like(first, num_keys - 1)  # the queries up to `clear` see all keys
    if rows is not None:
        seeing = rows.last_seeing[:, last[0]]
        is_one = rows.start[:, last[0]] <= first
        clear = jnp.where(is_one, rows.end[:, first[0]], -1)
    filled = -(-num_queries // block_q) * block_q  # rows of all tiles

    def band(nearest: int, reach: int) -> jax.Array:
        whole = first + nearest - halo, jnp.minimum(last + reach - 1, seeing) + 1 - halo
        stop = jnp.minimum(first + reach - 1, clear) + 1 - halo
        inner = last + nearest - halo, jnp.where(stop >= num_queries, filled, stop)
        return _bounds(whole, inner, block_q, is_empty=nearest == reach)

    return jnp.stack([band(*x) for x in bands], 2)


type _Span = tuple[jax.Array, jax.Array]


def _bounds(whole: _Span, inner: _Span, block: int, is_empty: bool) -> jax.Array:
    """[..., 4] from spans of positions (start, stop): the tiles with any of `whole`, those with
    nothing but `inner`."""
    first = jnp.maximum(whole[0], 0)
    start = first // block
    stop = jnp.where((first < whole[1]) & (not is_empty), -(-whole[1] // block), start)
    inner_stop = jnp.clip(inner[1] // block, start, stop)
    inner_start = jnp.clip(-(-inner[0] // block), start, inner_stop)
    return jnp.stack(jnp.broadcast_arrays(start, inner_start, inner_stop, stop), -1)
