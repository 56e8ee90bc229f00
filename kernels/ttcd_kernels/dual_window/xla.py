"""Dual-window attention in XLA, block of queries by block: bytes O(T * window), forward and
backward.

A scan over blocks of c queries takes the w_T + c rows of K and V that its block can see. One score
matrix s [c, w_T + c] serves both windows: softmax over all visible columns gives the teacher, over
the near band (distance < w_S) the student. The teacher's sums thus have one order whatever w_S is,
and a plain layer's output equals a dual one's to the last bit. The backward goes by bands
(`cotangents.py`); its dK and dV leave the scan through a rolling window of w_T + c rows.

Inside: B batch, c queries of a block (axis T), E = w_T + c keys (axis S), K kv heads, G = N / K, H
head dim.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ttcd_kernels.dual_window.cotangents import QKV, Residuals, by_band, with_gradients
from ttcd_kernels.windows import Results, Windows

_MAX_SCORE_ELEMENTS = 1 << 24  # one block's scores: 64 MiB in float32
# Bounds of a block of half a window: c rows compute w + c columns for w visible ones, and 256 rows
# stay in a CPU's cache. Windows 128/64 on two cores: 64 rows 0.20 s, 256 rows 0.55 s.
_MIN_BLOCK, _MAX_BLOCK = 16, 256
_MIN_CAPPED_BLOCK = 64  # the limit on scores makes no block smaller


class _Shape(NamedTuple):
    """Static facts of a call. Windows are at most the number of keys; `block` rows per step."""

    teacher_window: int
    student_window: int  # equal to teacher_window: one window only, the far band is empty
    scale: float
    block: int
    halo: int  # keys before the first query

    @property
    def near_start(self) -> int:
        """First column of the near keys; the far ones, if there are any, end c columns later."""
        return self.teacher_window - self.student_window


def block_rows(batch_heads: int, length: int, window: int) -> int:
    """Queries per block: the largest power of two up to half the window, 16 to 256, fewer (down to
    64) when a block's scores would exceed 64 MiB."""
    half_window = 1 << max(window // 2, 1).bit_length() - 1
    block = min(max(half_window, _MIN_BLOCK), _MAX_BLOCK)

    def scores(block: int) -> int:
        return batch_heads * block * (window + block)

    while block > _MIN_CAPPED_BLOCK and scores(block) > _MAX_SCORE_ELEMENTS:
        block //= 2
    return min(block, length)


def dual_window(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, windows: Windows
) -> Results:
    """All four results of the call, differentiable through all of them."""
    T, S = q.shape[1], k.shape[1]
    if windows.teacher >= S and 8 * _shape(windows, q, k).block <= T:
        return _causal_halves(q, k, v, segment_ids, windows)
    return with_gradients(_forward, gradients, windows, q, k, v, segment_ids)


def _shape(windows: Windows, q: jax.Array, k: jax.Array) -> _Shape:
    B, T, N, _ = q.shape
    S = k.shape[1]
    windows = windows.within(S)
    return _Shape(*windows, block_rows(B * N, T, windows.teacher), S - T)


def _causal_halves(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, windows: Windows
) -> Results:
    """Full attention: the first half of the queries never looks at the second half's keys, so each
    half is a separate call (recursively), which saves most of the masked products."""
    half, S = q.shape[1] // 2, k.shape[1]
    seen = S - q.shape[1] + half
    early_ids = None if segment_ids is None else segment_ids[:, :seen]
    early = dual_window(q[:, :half], k[:, :seen], v[:, :seen], early_ids, windows)
    late = with_gradients(_forward, gradients, windows, q[:, half:], k, v, segment_ids)
    whole = (jnp.concatenate(parts, axis=1) for parts in zip(early, late, strict=True))
    return cast(Results, tuple(whole))


def _pad_rows(x: jax.Array, front: int, back: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (front, back)) + ((0, 0),) * (x.ndim - 2))


def _to_blocks(x: jax.Array, block: int) -> jax.Array:
    """[B, T, ...] -> [blocks, B, c, ...], T padded to whole blocks."""
    x = _pad_rows(x, 0, -x.shape[1] % block)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def _from_blocks(x: jax.Array, length: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _grouped(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, c, N, ...] -> [B, K, G, c, ...]."""
    x = x.reshape(*x.shape[:2], num_kv_heads, -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def _ungrouped(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


class _Window(NamedTuple):
    """Keys, values and masks of one block of queries."""

    k: jax.Array  # [B, E, K, H]
    v: jax.Array
    near: jax.Array  # bool, broadcastable to [B, K, G, c, E]
    far: jax.Array


def _window(
    shape: _Shape, k_pad: jax.Array, v_pad: jax.Array, ids_pad: jax.Array | None, index: jax.Array
) -> _Window:
    """Keys of block `index` and the masks of its two bands. K and V carry w_T rows of front
    padding, so the query in row r of the block is at column r + w_T."""
    w_T, c = shape.teacher_window, shape.block
    start, extent = index * c + shape.halo, shape.teacher_window + shape.block
    rows = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=extent, axis=1)
    column = jnp.arange(extent)
    distance = jnp.arange(c)[:, None] + w_T - column[None, :]
    visible = (distance >= 0) & (distance < w_T) & (start + column >= w_T)[None, :]
    if ids_pad is not None:
        ids = rows(ids_pad, start)
        visible = visible & (ids[:, w_T:, None] == ids[:, None, :])[:, None, None]
    is_near = distance < shape.student_window
    near, far = visible & is_near, visible & ~is_near
    if ids_pad is not None:
        # Fused, they would be recomputed at every use: four times the time on a CPU.
        near, far = jax.lax.optimization_barrier((near, far))
    return _Window(rows(k_pad, start), rows(v_pad, start), near, far)


def _padded(
    shape: _Shape, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    back = -q.shape[1] % shape.block
    pad = functools.partial(_pad_rows, front=shape.teacher_window, back=back)
    return pad(k), pad(v), None if segment_ids is None else pad(segment_ids)


def _forward(
    windows: Windows, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
) -> Results:
    shape = _shape(windows, q, k)
    T, K = q.shape[1], k.shape[2]
    state = jnp.promote_types(q.dtype, jnp.float32)
    k_pad, v_pad, ids_pad = _padded(shape, q, k, v, segment_ids)
    near_start = shape.near_start
    dot = functools.partial(jnp.einsum, preferred_element_type=state)

    def attend(score: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(output, lse) of softmax over the columns; a query always sees itself."""
        peak = score.max(-1, keepdims=True)
        weight = jnp.exp(score - peak)
        total = weight.sum(-1, keepdims=True)
        acc = dot("BKGTS,BSKH->BKGTH", weight.astype(values.dtype), values)
        return acc / total, peak + jnp.log(total)

    def one_block(_: None, operands: Any) -> tuple[None, tuple[jax.Array, ...]]:
        index, q_BTNH = operands
        window = _window(shape, k_pad, v_pad, ids_pad, index)
        score = dot("BKGTH,BSKH->BKGTS", _grouped(q_BTNH, K), window.k) * shape.scale
        near = jnp.where(window.near, score, -jnp.inf)[..., near_start:]
        student, student_lse = attend(near, window.v[:, near_start:])
        teacher, teacher_lse = student, student_lse
        if near_start:
            every = jnp.where(window.near | window.far, score, -jnp.inf)
            teacher, teacher_lse = attend(every, window.v)
        out = teacher.astype(q.dtype), student.astype(q.dtype), teacher_lse, student_lse
        return None, tuple(_ungrouped(x) for x in out)

    q_blocks = _to_blocks(q, shape.block)
    _, blocks = jax.lax.scan(one_block, None, (jnp.arange(len(q_blocks)), q_blocks))
    teacher, student, teacher_lse, student_lse = (_from_blocks(x, T) for x in blocks)
    return teacher, student, teacher_lse[..., 0], student_lse[..., 0]


def gradients(windows: Windows, saved: Residuals, cotangents: Results) -> QKV:
    """dq, dk, dv from the results' cotangents, whichever implementation computed the results."""
    q, k, v = saved.q, saved.k, saved.v
    shape = _shape(windows, q, k)
    state = saved.teacher_lse.dtype
    bands = by_band(saved, cotangents)
    rows = (q, bands.near_out, bands.near_delta[..., None], saved.student_lse[..., None])
    rows += (bands.far_out, bands.far_delta[..., None], saved.teacher_lse[..., None])
    blocks = tuple(_to_blocks(x, shape.block) for x in rows)
    padded = _padded(shape, q, k, v, saved.segment_ids)
    extent = shape.teacher_window + shape.block
    empty = jnp.zeros((k.shape[0], extent, *k.shape[2:]), state)

    def one_block(carry: Any, operands: Any) -> tuple[Any, tuple[jax.Array, ...]]:
        index, *rows = operands
        dq, dk, dv = _backward_block(shape, _window(shape, *padded, index), rows)
        dk, dv = carry[0] + dk, carry[1] + dv
        c = shape.block  # the oldest c rows are final: the next block starts c rows later
        carry = tuple(_pad_rows(x[:, c:], 0, c) for x in (dk, dv))
        return carry, (dq.astype(q.dtype), dk[:, :c].astype(k.dtype), dv[:, :c].astype(v.dtype))

    carry, (dq, dk, dv) = jax.lax.scan(
        one_block, (empty, empty), (jnp.arange(len(blocks[0])), *blocks)
    )

    def whole(done: jax.Array, rest: jax.Array, like: jax.Array) -> jax.Array:
        """Finished rows, then those of the last window; without the padding before the first."""
        total = jnp.concatenate([_from_blocks(done, done.shape[0] * shape.block), rest], axis=1)
        total = _pad_rows(total, shape.halo, 0).astype(like.dtype)
        return total[:, shape.teacher_window : shape.teacher_window + like.shape[1]]

    return _from_blocks(dq, q.shape[1]), whole(dk, carry[0], k), whole(dv, carry[1], v)


def _backward_block(
    shape: _Shape, window: _Window, rows: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [B, c, N, H] of one block and its share of dk, dv [B, E, K, H]: five matrix products."""
    state = rows[3].dtype
    dot = functools.partial(jnp.einsum, preferred_element_type=state)
    near_start = shape.near_start
    K, dtype = window.k.shape[2], window.k.dtype
    q, d_near, D_near, lse_near, d_far, D_far, lse_far = (_grouped(x, K) for x in rows)
    score = dot("BKGTH,BSKH->BKGTS", q, window.k) * shape.scale

    def band(
        mask: jax.Array, columns: slice, lse: jax.Array, d_out: jax.Array, D: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(dS, dV) of one band, padded to all columns of the window."""
        values = window.v[:, columns]
        weight = jnp.exp(jnp.where(mask, score, -jnp.inf)[..., columns] - lse)
        d_weight = dot("BKGTH,BSKH->BKGTS", d_out, values)
        d_score = (weight * (d_weight - D)).astype(dtype)
        d_values = dot("BKGTS,BKGTH->BSKH", weight.astype(dtype), d_out)
        return d_score, d_values

    d_score, dv = band(window.near, slice(near_start, None), lse_near, d_near, D_near)
    d_score = jnp.pad(d_score, ((0, 0),) * 4 + ((near_start, 0),))
    dv = _pad_rows(dv, near_start, 0)
    if near_start:
        far_columns, back = slice(near_start + shape.block), shape.student_window
        d_far_score, dv_far = band(window.far, far_columns, lse_far, d_far, D_far)
        d_score = d_score + jnp.pad(d_far_score, ((0, 0),) * 4 + ((0, back),))
        dv = dv + _pad_rows(dv_far, 0, back)
    dq = dot("BKGTS,BSKH->BKGTH", d_score, window.k) * shape.scale
    dk = dot("BKGTS,BKGTH->BSKH", d_score, q) * shape.scale
    return _ungrouped(dq), dk, dv
