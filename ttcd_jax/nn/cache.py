"""Keys and values of the positions that attention may still look at: a ring per row."""

from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from ttcd_kernels import dual_window_attention
from ttcd_kernels.decode import api as decode
from ttcd_kernels.dual_window.api import Implementation

from ttcd_jax.errors import UserError
from ttcd_jax.nn.stream import Piece, put
from ttcd_jax.sharding.attention import over_parts


class KVCache(NamedTuple):
    """Position p lies in slot p mod W. Slots that were never written are zero."""

    keys: Float[Array, "B W K H"]
    values: Float[Array, "B W K H"]


def empty_cache(
    batch_size: int,
    num_slots: int | None,
    num_heads: int,
    head_dim: int,
    dtype: DTypeLike,
) -> KVCache:
    """`num_slots`: the window; of full attention the most tokens that a row will have.

    Raises `UserError` when that is not known.
    """
    if num_slots is None:
        raise UserError(
            "full attention keeps all keys: give max_length, the most tokens that a row will have"
        )
    shape = (batch_size, num_slots, num_heads, head_dim)
    # Two arrays: a state is donated, and no buffer twice.
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def cached_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    piece: Piece,
    cache: KVCache,
    *,
    window: int | None,
    student_window: int | None,
    implementation: Implementation,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N H"], KVCache]:
    """(teacher, student, the cache behind the piece): q under both windows over what is kept and
    what comes. Equal windows: equal outputs."""
    if q.shape[1] == 1:
        cache = _appended(cache, k, v, piece)
        teacher, student = _one_token(q, piece, cache, window, student_window, implementation)
        return teacher, student, cache
    ids = None
    keys, values = k, v
    if piece.halo:
        keys, values = (
            jnp.concatenate([_newest(x, piece), new], axis=1)
            for x, new in zip(cache, (k, v), strict=True)
        )
    if piece.has_gap:
        # What was never written is a document of its own.
        positions = piece.start[:, None] + jnp.arange(-piece.halo, k.shape[1])
        ids = (positions >= 0).astype(jnp.int32)

    def windows(q, k, v, segment_ids):
        return dual_window_attention(
            q,
            k,
            v,
            teacher_window=window,
            student_window=student_window,
            segment_ids=segment_ids,
            implementation=implementation,
        )

    teacher, student = over_parts(windows, q, keys, values, ids, window, num_outputs=2)
    return teacher, student, _appended(cache, k, v, piece)


def _one_token(q, piece: Piece, cache: KVCache, window, student_window, implementation):
    slots = cache.keys.shape[1]
    # Kernels for long rows (mosaic, lse) have no form for one query.
    is_shared = implementation in get_args(decode.Implementation)
    teacher, student = decode.decode_attention(
        q[:, 0],
        *cache,
        piece.start + piece.lengths - 1,
        teacher_window=min(window or slots, slots),
        student_window=min(student_window or slots, slots),
        implementation=implementation if is_shared else "auto",
    )
    return teacher[:, None], student[:, None]


def _newest(x: Float[Array, "B W K H"], piece: Piece) -> Float[Array, "B S K H"]:
    """The `halo` positions in front of the piece, in order."""
    slots = (piece.start[:, None] + jnp.arange(-piece.halo, 0)) % x.shape[1]
    return jax.vmap(lambda row, slots: row[slots])(x, slots)


def _appended(cache: KVCache, k: jax.Array, v: jax.Array, piece: Piece) -> KVCache:
    slots = cache.keys.shape[1]
    place = jnp.arange(k.shape[1])
    is_kept = (place < piece.lengths[:, None]) & (place >= piece.lengths[:, None] - slots)
    targets = jnp.where(is_kept, piece.positions(k.shape[1]) % slots, slots)
    return KVCache(put(cache.keys, k, targets), put(cache.values, v, targets))
