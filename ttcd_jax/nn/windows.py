"""Attention under one or two causal windows, over whole rows and over pieces of them.

On several devices along `seq` a query sees at most window - 1 keys before its device's part: a halo
from the neighbors, not a ring, whatever the length of the row. Only full attention needs all keys.
Heads are independent: no traffic along `tensor`.
"""

from typing import NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from ttcd_kernels import dual_window_attention, window_attention
from ttcd_kernels.decode import api as decode
from ttcd_kernels.dual_window.api import Implementation

from ttcd_jax.errors import UserError
from ttcd_jax.nn.row import Piece, after_tail, scatter
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
) -> Outputs:
    """The output of each window; the queries are the last T of the S positions.

    Raises `UserError` when `tensor` does not divide the kv heads.
    """
    num_heads, parts = k.shape[2], rules.axis_size("tensor")
    if num_heads % parts:
        raise UserError(
            f"{num_heads} kv heads do not divide among {parts} devices of mesh axis tensor: lower "
            "MeshConfig.tensor"
        )

    def on_shard(
        shard: rules.Shard, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
    ) -> Outputs:
        reach = None if windows[0] is None else windows[0] - 1
        (k, v), segment_ids = sequence.halo(shard, (k, v), segment_ids, reach)
        options = {"segment_ids": segment_ids, "implementation": implementation}
        if len(windows) == 1:
            return (window_attention(q, k, v, window=windows[0], **options),)
        teacher, student = windows
        return dual_window_attention(
            q, k, v, teacher_window=teacher, student_window=student, **options
        )

    queries, keys = (("batch", "length", heads) for heads in ("heads", "kv_heads"))
    names = (queries, keys, keys, ("batch", "length"))
    return rules.sharded(on_shard, names, (queries,) * len(windows))(q, k, v, segment_ids)


class KVCache(NamedTuple):
    """Keys and values of the positions that attention may still see, a ring per row: position p
    is in slot p mod W. Slots that were never written are zero."""

    keys: Float[Array, "B W K H"]
    values: Float[Array, "B W K H"]

    def axes(self) -> "KVCache":
        names = ("batch", None, "kv_heads", None)
        return KVCache(names, names)  # pyright: ignore[reportArgumentType]

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
) -> tuple[Outputs, KVCache]:
    """(the output of each window, the cache after the piece): `attend` over the cache and the
    piece."""
    if q.shape[1] == 1:
        cache = _appended(cache, k, v, piece)
        return _one_token(q, piece, cache, windows, implementation), cache
    piece.cut.check("window", windows[0])
    ids, keys, values = None, k, v
    if piece.halo:  # the positions before the piece, in order
        slots = (piece.start[:, None] + jnp.arange(-piece.halo, 0)) % cache.keys.shape[1]
        halo = jax.vmap(lambda row, slots: jax.tree.map(lambda x: x[slots], row))(cache, slots)
        keys, values = after_tail(halo, KVCache(k, v))
    if piece.has_gap:
        # Slots that were never written are one more document.
        positions = piece.start[:, None] + jnp.arange(-piece.halo, k.shape[1])
        ids = (positions >= 0).astype(jnp.int32)
    seen = attend(q, keys, values, ids, windows, implementation)
    return seen, _appended(cache, k, v, piece)


def _one_token(
    q: jax.Array, piece: Piece, cache: KVCache, windows: Windows, implementation: Implementation
) -> Outputs:
    slots = cache.keys.shape[1]
    # A kernel for long rows (mosaic) has no form for one query.
    has_form = implementation in get_args(decode.Implementation)
    chosen = cast(decode.Implementation, implementation) if has_form else "auto"
    teacher, student = decode.decode_attention(
        q[:, 0],
        *cache,
        piece.start + piece.lengths - 1,
        teacher_window=min(windows[0] or slots, slots),
        student_window=min(windows[-1] or slots, slots),
        implementation=chosen,
    )
    return (teacher[:, None], student[:, None])[: len(windows)]


def _appended(cache: KVCache, k: jax.Array, v: jax.Array, piece: Piece) -> KVCache:
    slots = cache.keys.shape[1]
    offset = jnp.arange(k.shape[1])
    is_kept = (offset < piece.lengths[:, None]) & (offset >= piece.lengths[:, None] - slots)
    targets = jnp.where(is_kept, piece.positions(k.shape[1]) % slots, slots)
    return KVCache(scatter(cache.keys, k, targets), scatter(cache.values, v, targets))
