"""Dual-window attention in XLA, block of queries by block: bytes O(T * window), forward and
backward.

A scan over blocks of c queries reads the w_T + c rows of K and V that its block can see. One score
matrix s [c, w_T + c] serves both windows: softmax over all visible columns gives the teacher, over
the near band (distance < w_S) the student. The teacher's sums thus have one order whatever w_S is,
and a plain layer's output equals a dual one's to the last bit. The backward goes by bands
(`cotangents.py`). Results and gradients are written in place: a CPU reuses one block's memory.

Inside: B batch, c queries of a block (axis T), keys of a band (axis S), K kv heads, G = N / K, H
head dim. The backward has its keys first, s [w_T + c, c]: XLA's products on a CPU are half as fast
where the score matrix is the transposed left operand.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ttcd_kernels.dual_window.cotangents import QKV, with_gradients
from ttcd_kernels.windows import Ids, Keys, Lses, Outs, Queries, Results, Windows

# Of queries [B, T] and of keys [B, S].
type TwoIds = tuple[jax.Array, jax.Array] | None

_MAX_SCORE_ELEMENTS = 1 << 24  # one block's scores: 64 MiB in float32
_MIN_BLOCK, _MAX_BLOCK = 16, 128
# Products of fewer rows are slow on a CPU. Windows 128/64 on two cores: 32 rows 12.4 ms, 64 rows
# 11.9 ms, 128 rows 14.9 ms; windows 512: 64 rows 76 ms, 128 rows 74 ms.
_EFFICIENT_BLOCK = 64


class _Shape(NamedTuple):
    """Static sizes of a call."""

    windows: Windows  # at most the number of keys; equal ones: the far band is empty
    block: int  # queries per step
    halo: int  # keys before the first query
    num_keys: int  # with those that fill the last block

    @property
    def has_far(self) -> bool:
        return self.windows.student < self.windows.teacher


def block_rows(batch_heads: int, length: int, window: int) -> int:
    """Queries per block, a power of two: c rows compute w + c columns for w visible ones. A quarter
    of the window from 64 to 128, in shorter windows up to the window, at least 16; 64 where a
    block's scores would otherwise exceed 64 MiB. GPUs, which start a dozen kernels per block, take
    half the window up to 256."""
    block = min(max(window // 4, min(window, _EFFICIENT_BLOCK), _MIN_BLOCK), _MAX_BLOCK)
    if jax.default_backend() != "cpu":
        block = max(block, min(window // 2, 2 * _MAX_BLOCK))
    block = 1 << block.bit_length() - 1
    while block > _EFFICIENT_BLOCK and batch_heads * block * (window + block) > _MAX_SCORE_ELEMENTS:
        block //= 2
    return min(block, length)


def dual_window(q: Queries, k: Keys, v: Keys, segment_ids: Ids | None, windows: Windows) -> Results:
    """All four results of the call, differentiable through all of them.

    The first queries see fewer keys than the window has. Where they fill eight blocks and a quarter
    of the row, they, at most half the row, are a separate call (recursively), which saves most of
    their masked products; not where the halo is half the window or more, since little is saved and
    each call may copy the keys.
    """
    T, S = q.shape[1], k.shape[1]
    early = min(windows.teacher - (S - T), T)
    few = early < max(8 * _shape(windows, q, k).block, T // 4)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> Results:
        return _forward(windows, q, k, v, of_both(ids, q))

    passes = forward, functools.partial(gradients, windows)
    if few or windows.teacher <= 2 * (S - T):
        return with_gradients(*passes, q, k, v, segment_ids)
    early = min(early, T // 2)
    seen = S - T + early
    ids = None if segment_ids is None else segment_ids[:, :seen]
    first = dual_window(q[:, :early], k[:, :seen], v[:, :seen], ids, windows)
    rest = with_gradients(*passes, q[:, early:], k, v, segment_ids)
    whole = (jnp.concatenate(parts, axis=1) for parts in zip(first, rest, strict=True))
    return cast(Results, tuple(whole))


def _shape(windows: Windows, q: jax.Array, k: jax.Array) -> _Shape:
    B, T, N, _ = q.shape
    S = k.shape[1]
    windows = windows.within(S)
    block = block_rows(B * N, T, windows.teacher)
    return _Shape(windows, block, S - T, S + -T % block)


def _product(operand: jax.Array, result: Any) -> Any:
    """An einsum that multiplies float32 in full: JAX's default on a GPU is TF32."""
    precision = "highest" if operand.dtype == jnp.float32 else None
    return functools.partial(jnp.einsum, precision=precision, preferred_element_type=result)


_take = functools.partial(jax.lax.dynamic_slice_in_dim, axis=1)


def _pad_rows(rows: int, *arrays: Any) -> Any:
    pads = ((0, 0), (0, rows), (0, 0), (0, 0))
    return jax.tree.map(lambda x: jnp.pad(x, pads[: x.ndim]), arrays)


def _put(x: jax.Array, part: jax.Array, start: jax.Array, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis)


def _add(x: jax.Array, part: jax.Array, start: jax.Array, axis: int = 1) -> jax.Array:
    return _put(x, part + _take(x, start, part.shape[axis], axis=axis), start, axis)


def _grouped(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, c, N, ...] -> [B, K, G, c, ...]."""
    x = x.reshape(*x.shape[:2], num_kv_heads, -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def _ungrouped(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


class _Band(NamedTuple):
    """The keys at distances `nearest` <= i - j < `reach` from the queries i of one block, and as
    many more as make the number of columns static."""

    start: jax.Array
    columns: int
    mask: jax.Array  # bool [B or 1, c, columns]

    def rows(self, x: jax.Array) -> jax.Array:
        """[B, S, K, H] -> [B, K, columns, H]."""
        return _take(x, self.start, self.columns).swapaxes(1, 2)


def _band(shape: _Shape, ids: TwoIds, index: jax.Array, nearest: int, reach: int) -> _Band:
    row = index * shape.block
    first = row + shape.halo
    columns = min(reach - nearest + shape.block, shape.num_keys)
    start = jnp.clip(first - reach, 0, shape.num_keys - columns)
    distance = first - start + jnp.arange(shape.block)[:, None] - jnp.arange(columns)
    mask = ((distance >= nearest) & (distance < reach))[None]
    if ids is not None:
        of_queries, of_keys = _take(ids[0], row, shape.block), _take(ids[1], start, columns)
        mask = mask & (of_queries[:, :, None] == of_keys[:, None, :])
    return _Band(start, columns, mask)


def of_both(segment_ids: Ids | None, q: Queries) -> TwoIds:
    """The documents of queries and of keys."""
    return None if segment_ids is None else (segment_ids[:, -q.shape[1] :], segment_ids)


def one_window(
    q: Queries, k: Keys, v: Keys, ids: TwoIds, window: int, scale: float
) -> tuple[Outs, Lses]:
    """(out [B, T, N, H], lse [B, T, N]) without gradients. A query that sees no key has a finite
    out, and an lse far below any."""
    out, _, lse, _ = _forward(Windows(window, window, scale), q, k, v, ids)
    return out, lse


def _forward(windows: Windows, q: jax.Array, k: jax.Array, v: jax.Array, ids: TwoIds) -> Results:
    shape = _shape(windows, q, k)
    T, K, c = q.shape[1], k.shape[2], shape.block
    state = jnp.promote_types(q.dtype, jnp.float32)
    dot = _product(q, state)
    q, k, v, ids = _pad_rows(-T % c, q, k, v, ids)
    never = jnp.finfo(state).min  # not -inf, which would make NaN of a query that sees no key

    def attend(score: jax.Array, band: _Band) -> tuple[jax.Array, jax.Array]:
        """(output, lse) of softmax over the columns."""
        score = jnp.where(band.mask[:, None, None], score, never)
        peak = score.max(-1, keepdims=True)
        weight = jnp.exp(score - peak)
        total = weight.sum(-1, keepdims=True)
        acc = dot("BKGTS,BKSH->BKGTH", weight.astype(v.dtype), band.rows(v))
        return _ungrouped(acc / total), _ungrouped(peak + jnp.log(total))[..., 0]

    def one_block(results: Any, index: jax.Array) -> tuple[Any, None]:
        # Under `jax.checkpoint` arrays without q, the masks of all blocks, would be kept for the
        # backward: T S bytes per head.
        index, queries = jax.lax.optimization_barrier((index, _take(q, index * c, c)))
        row = index * c
        every = _band(shape, ids, index, 0, shape.windows.teacher)
        keys = jax.lax.optimization_barrier(every.rows(k))
        score = dot("BKGTH,BKSH->BKGTS", _grouped(queries, K), keys) * shape.windows.scale
        found = attend(score, every)
        if shape.has_far:
            near = _band(shape, ids, index, 0, shape.windows.student)
            found += attend(_take(score, near.start - every.start, near.columns, axis=4), near)
        return tuple(_put(x, part, row) for x, part in zip(results, found, strict=True)), None

    empty = jnp.zeros_like(q), jnp.zeros(q.shape[:3], state)
    empty *= 1 + shape.has_far
    results, _ = jax.lax.scan(one_block, empty, jnp.arange(q.shape[1] // c))
    results = [x[:, :T] for x in results]
    teacher, teacher_lse, student, student_lse = results if shape.has_far else results * 2
    return teacher, student, teacher_lse, student_lse


def gradients(windows: Windows, *arrays: Any) -> QKV:
    """dq, dk, dv from the arrays of `cotangents.backward_operands`: five matrix products per block
    of queries."""
    q, k, v, segment_ids, *of_bands = arrays
    shape = _shape(windows, q, k)
    (T, S), c, state = (q.shape[1], k.shape[1]), shape.block, of_bands[-1].dtype
    rows = q, *of_bands[: 3 * (1 + shape.has_far)]
    rows, k, v, ids = _pad_rows(-T % c, rows, k, v, of_both(segment_ids, q))
    dot, K, scale = _product(q, state), k.shape[2], shape.windows.scale
    w_T, w_S, _ = shape.windows

    def one_block(totals: Any, index: jax.Array) -> tuple[Any, None]:
        dq, dk, dv = totals
        q, *of_bands = (_grouped(_take(x, index * c, c), K) for x in rows)
        every = _band(shape, ids, index, 0, w_T)
        score = dot("BKSH,BKGTH->BKSGT", every.rows(k), q) * scale
        d_score = jnp.zeros_like(score)
        for nearest, reach in ((0, w_S), (w_S, w_T))[: 1 + shape.has_far]:
            band = _band(shape, ids, index, nearest, reach)
            offset = band.start - every.start
            (d_out, D, lse), of_bands = of_bands[:3], of_bands[3:]
            weight = jnp.exp(_take(score, offset, band.columns, axis=2) - lse[:, :, None])
            weight = jnp.where(band.mask.swapaxes(1, 2)[:, None, :, None], weight, 0)
            d_weight = dot("BKSH,BKGTH->BKSGT", band.rows(v), d_out)
            d_values = dot("BKSGT,BKGTH->BKSH", weight.astype(k.dtype), d_out)
            dv = _add(dv, d_values.swapaxes(1, 2), band.start)
            part = weight * (d_weight - D[:, :, None]) * scale
            d_score = _add(d_score, part, offset, axis=2)
        d_score = d_score.astype(k.dtype)
        k_BKHS = jax.lax.optimization_barrier(every.rows(k).swapaxes(2, 3))
        dq_block = jnp.moveaxis(dot("BKHS,BKSGT->BKHGT", k_BKHS, d_score), 2, -1)
        d_keys = dot("BKSGT,BKGTH->BKSH", d_score, q)
        dk = _add(dk, d_keys.swapaxes(1, 2), every.start)
        return (_put(dq, _ungrouped(dq_block), index * c), dk, dv), None

    empty = jnp.zeros_like(rows[0]), jnp.zeros(k.shape, state), jnp.zeros(k.shape, state)
    (dq, dk, dv), _ = jax.lax.scan(one_block, empty, jnp.arange(rows[0].shape[1] // c))
    return dq[:, :T], dk[:, :S].astype(k.dtype), dv[:, :S].astype(v.dtype)
