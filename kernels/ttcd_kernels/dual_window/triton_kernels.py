"""Dual-window attention as Triton kernels: the forward in one sweep, and the gradients for q and
for k, v.

A band is the keys at min_distance <= i - j < max_distance of query i. The near band (0 .. w_S) is
the student's window; with the far band (w_S .. w_T) it is the teacher's. In base 2, with s = q k^T
scale log2(e), a tile of keys updates the softmax state

    m' = max(m, max s),  l' = l 2^(m - m') + sum 2^(s - m'),  acc' = acc 2^(m - m') + 2^(s - m') v

*forward* runs it from the diagonal outward. After the near band it is the student's result,
acc / l with lse = (m + log2 l) ln 2; carried on through the far band it is the teacher's.

*backward* is the ordinary one in both bands, P = exp(s - lse), with operands that differ by band:

    dS = P * (dO V^T - D),  dQ = dS K scale,  dK = dS^T Q scale,  dV = P^T dO
    near:  lse_S,  dO_S + rho dO_T,  D_S + rho D_T     far:  lse_T,  dO_T,  D_T

(rho = exp(lse_S - lse_T), D = rowsum(dO * O) - d_lse; from `cotangents.py`). They come stacked,
near first, so that one loop serves both bands. No atomics: one program writes each result.

Arrays are contiguous: q, outputs and cotangents [B, T, N, H], k and v [B, S, K, H], lse and D [B,
N, T], ids [B, S]. Query row t has position t + S - T. Row offsets are 64 bit: B T N H may pass
2^31. tiles are those of `tiles.key_tiles`, for dk and dv of `tiles.query_tiles`.
"""

# pyright: reportGeneralTypeIssues=false
# (tl.static_range is a loop for Triton's compiler only)

import triton
import triton.language as tl

from ttcd_kernels.columns import columns, inside

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bounds(tiles_ptr, band, HAS_SEGMENTS: tl.constexpr):
    """(start, inner_start, inner_stop, stop) of the tiles that this program visits in a band. Every
    pair of the inner ones is visible; the others are masked."""
    base = tiles_ptr + tl.program_id(0) * 8 + band * 4
    if HAS_SEGMENTS:
        base += tl.program_id(2) * tl.num_programs(0) * 8
    return tl.load(base), tl.load(base + 1), tl.load(base + 2), tl.load(base + 3)


@triton.jit
def _query_rows(tile, head, batch, T, N, H: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's query rows, and the offsets of their elements [BLOCK_M, columns] in [B, T, N, H]."""
    row = tl.arange(0, BLOCK_M)
    base = (tl.cast(batch, tl.int64) * T + tile * BLOCK_M) * N * H + head * H
    return tile * BLOCK_M + row, base + row[:, None] * (N * H) + columns(H)[None, :]


@triton.jit
def _load_rows(base, start, stride, S, BLOCK: tl.constexpr, H: tl.constexpr, CHECKS: tl.constexpr):
    """Rows start .. start + BLOCK - 1 of one head [BLOCK, columns]; zeros after the last of S."""
    row = tl.arange(0, BLOCK)
    pointers = base + tl.cast(start, tl.int64) * stride
    pointers = pointers + row[:, None] * stride + columns(H)[None, :]
    if CHECKS:
        return tl.load(pointers, mask=inside(start + row < S, H), other=0.0)
    elif triton.next_power_of_2(H) == H:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside(row < BLOCK, H), other=0.0)


@triton.jit
def _load_ids(base, index, S, HAS_SEGMENTS: tl.constexpr):
    if HAS_SEGMENTS:
        return tl.load(base + index, mask=index < S, other=0)
    else:
        return index


@triton.jit
def _masked(x, other, queries, start, reach, ids_base, S, HAS_SEGMENTS: tl.constexpr):
    """x [queries, keys from `start` on] where visible; queries are (position, id), `reach` is (min,
    max) distance."""
    position, ids_q = queries
    key = start + tl.arange(0, x.shape[1])
    ids_k = _load_ids(ids_base, key, S, HAS_SEGMENTS)
    distance = position[:, None] - key[None, :]
    visible = (distance >= reach[0]) & (distance < reach[1]) & (key < S)[None, :]
    if HAS_SEGMENTS:
        visible = visible & (ids_q[:, None] == ids_k[None, :])
    return tl.where(visible, x, other)


@triton.jit
def dual_window_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    ids_ptr,
    tiles_ptr,
    T,
    S,
    N,
    K,
    teacher_window,
    student_window,
    scale_log2,
    teacher_ptr,
    student_ptr,
    teacher_lse_ptr,
    student_lse_ptr,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (query tiles, N, B): both outputs and both log-sum-exps of one tile of one head. The
    scale is above 0."""
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, at = _query_rows(tile, head, batch, T, N, H, BLOCK_M)
    is_row, position = row < T, row + (S - T)
    q = tl.load(q_ptr + at, mask=inside(is_row, H), other=0.0)
    key_base = tl.cast(batch, tl.int64) * S * K * H + head // (N // K) * H
    ids_base = ids_ptr + tl.cast(batch, tl.int64) * S
    queries = position, _load_ids(ids_base, position, S, HAS_SEGMENTS)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, triton.next_power_of_2(H)], tl.float32)
    # Part r is the sum over keys r, r + NUM_PARTS, ... Where each warp has whole rows, a thread
    # holds the same of every eight keys: it adds those alone, and threads exchange sums once at the
    # end instead of in every tile.
    NUM_PARTS: tl.constexpr = 8 if BLOCK_M >= 128 else 1
    parts = tl.zeros([BLOCK_M, NUM_PARTS], tl.float32)
    at_lse = (tl.cast(batch, tl.int64) * N + head) * T + row
    for band in tl.static_range(2):  # near, then far on the same state
        reach = (0, student_window) if band == 0 else (student_window, teacher_window)
        tiles = _bounds(tiles_ptr, band, HAS_SEGMENTS)
        for part in tl.static_range(3):  # the nearest first: near edge, inner tiles, far edge
            for step in range(0, tiles[3 - part] - tiles[2 - part]):
                start = (tiles[3 - part] - 1 - step) * BLOCK_N
                k = _load_rows(k_ptr + key_base, start, K * H, S, BLOCK_N, H, part != 1)
                score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if part != 1:
                    score = _masked(
                        score, float("-inf"), queries, start, reach, ids_base, S, HAS_SEGMENTS
                    )
                # The largest score is found before scaling, which is part of the exponent's one
                # multiplication and addition.
                new_peak = tl.maximum(peak, tl.max(score, 1) * scale_log2)
                shift = new_peak
                if part != 1:
                    # A row that has seen no key yet has weights of 0, not 2^(inf - inf).
                    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                weight = tl.exp2(score * scale_log2 - shift[:, None])
                shrink = tl.exp2(peak - shift)
                v = _load_rows(v_ptr + key_base, start, K * H, S, BLOCK_N, H, part != 1)
                sums = tl.sum(tl.reshape(weight, BLOCK_M, BLOCK_N // NUM_PARTS, NUM_PARTS), 1)
                parts = parts * shrink[:, None] + sums
                acc = acc * shrink[:, None]
                acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
                peak = new_peak
        total = tl.sum(parts, 1)
        out_ptr = student_ptr if band == 0 else teacher_ptr
        lse_ptr = student_lse_ptr if band == 0 else teacher_lse_ptr
        out = acc / total[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside(is_row, H))
        tl.store(lse_ptr + at_lse, (peak + tl.log2(total)) * LN2, mask=is_row)


@triton.jit
def dual_window_backward_q(
    q_ptr,
    k_ptr,
    v_ptr,
    ids_ptr,
    tiles_ptr,
    d_out_ptr,
    lse_log2_ptr,
    delta_ptr,
    B,
    T,
    S,
    N,
    K,
    teacher_window,
    student_window,
    scale,
    dq_ptr,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (query tiles, N, B): dq of one tile of one head. d_out, lse and delta: [2, ...], near
    first."""
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, at = _query_rows(tile, head, batch, T, N, H, BLOCK_M)
    is_row, position = row < T, row + (S - T)
    q = tl.load(q_ptr + at, mask=inside(is_row, H), other=0.0)
    key_base = tl.cast(batch, tl.int64) * S * K * H + head // (N // K) * H
    ids_base = ids_ptr + tl.cast(batch, tl.int64) * S
    queries = position, _load_ids(ids_base, position, S, HAS_SEGMENTS)

    dq = tl.zeros([BLOCK_M, triton.next_power_of_2(H)], tl.float32)
    scale_log2 = scale * LOG2E
    for band in tl.static_range(2):
        at_row = ((tl.cast(batch, tl.int64) + band * B) * N + head) * T + row
        lse_log2 = tl.load(lse_log2_ptr + at_row, mask=is_row, other=0.0)
        delta = tl.load(delta_ptr + at_row, mask=is_row, other=0.0)
        plane = tl.cast(band * B, tl.int64) * T * N * H
        d_out = tl.load(d_out_ptr + plane + at, mask=inside(is_row, H), other=0.0)
        reach = (0, student_window) if band == 0 else (student_window, teacher_window)
        tiles = _bounds(tiles_ptr, band, HAS_SEGMENTS)
        for part in tl.static_range(3):
            for tile_n in range(tiles[part], tiles[part + 1]):
                start = tile_n * BLOCK_N
                k = _load_rows(k_ptr + key_base, start, K * H, S, BLOCK_N, H, part != 1)
                v = _load_rows(v_ptr + key_base, start, K * H, S, BLOCK_N, H, part != 1)
                score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
                weight = tl.exp2(score - lse_log2[:, None])
                if part != 1:
                    weight = _masked(weight, 0.0, queries, start, reach, ids_base, S, HAS_SEGMENTS)
                d_weight = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
                d_score = weight * (d_weight - delta[:, None])
                dq = tl.dot(d_score.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside(is_row, H))


@triton.jit
def dual_window_backward_kv(
    q_ptr,
    k_ptr,
    v_ptr,
    ids_ptr,
    tiles_ptr,
    d_out_ptr,
    lse_log2_ptr,
    delta_ptr,
    B,
    T,
    S,
    N,
    K,
    teacher_window,
    student_window,
    scale,
    dk_ptr,
    dv_ptr,
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (key tiles, K, B): dk and dv of one tile of one kv head, summed over its query heads and
    both bands in one loop. d_out, lse and delta: [2, ...], near first."""
    start, kv_head, batch = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2)
    key = start + tl.arange(0, BLOCK_N)
    key_base = tl.cast(batch, tl.int64) * S * K * H + kv_head * H
    k = _load_rows(k_ptr + key_base, start, K * H, S, BLOCK_N, H, True)
    v = _load_rows(v_ptr + key_base, start, K * H, S, BLOCK_N, H, True)
    ids_base = ids_ptr + tl.cast(batch, tl.int64) * S
    ids_k = _load_ids(ids_base, key, S, HAS_SEGMENTS)
    near_first, _, _, near_stop = _bounds(tiles_ptr, 0, HAS_SEGMENTS)
    far_first, _, _, far_stop = _bounds(tiles_ptr, 1, HAS_SEGMENTS)
    num_near, num_far = near_stop - near_first, far_stop - far_first
    per_head = num_near + num_far

    scale_log2 = scale * LOG2E
    dk = tl.zeros([BLOCK_N, triton.next_power_of_2(H)], tl.float32)
    dv = tl.zeros([BLOCK_N, triton.next_power_of_2(H)], tl.float32)
    for member in range(0, N // K):
        head = kv_head * (N // K) + member
        for index in range(0, per_head):
            is_far = index >= num_near
            band = tl.where(is_far, 1, 0)
            tile = tl.where(is_far, far_first + index - num_near, near_first + index)
            # Rows past the last are zeros, lse and D included, and add nothing.
            row, at = _query_rows(tile, head, batch, T, N, H, BLOCK_M)
            is_row = row < T
            q = tl.load(q_ptr + at, mask=inside(is_row, H), other=0.0)
            plane = tl.cast(band * B, tl.int64) * T * N * H
            d_out = tl.load(d_out_ptr + plane + at, mask=inside(is_row, H), other=0.0)
            at_row = ((tl.cast(batch, tl.int64) + band * B) * N + head) * T + row
            lse_log2 = tl.load(lse_log2_ptr + at_row, mask=is_row, other=0.0)
            delta = tl.load(delta_ptr + at_row, mask=is_row, other=0.0)

            # Transposed, [BLOCK_N, BLOCK_M]: the sums over queries below need no transpose.
            score = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            position = row + (S - T)
            low = tl.where(is_far, student_window, 0)
            width = tl.where(is_far, teacher_window - student_window, student_window)
            # One comparison for both ends of the band: a number below 0 is large without a sign.
            distance = position[None, :] - (key[:, None] + low)
            visible = distance.to(tl.uint32, bitcast=True) < width.to(tl.uint32)
            if HAS_SEGMENTS:
                ids_q = _load_ids(ids_base, position, S, HAS_SEGMENTS)
                visible = visible & (ids_q[None, :] == ids_k[:, None])
            weight = tl.where(visible, tl.exp2(score * scale_log2 - lse_log2[None, :]), 0.0)
            dv = tl.dot(weight.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
            d_weight = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
            d_score = weight * (d_weight - delta[None, :])
            dk = tl.dot(d_score.to(q.dtype), q, dk, input_precision=PRECISION)

    is_key = inside(key < S, H)
    at = tl.cast(start, tl.int64) * (K * H) + key_base
    at = at + tl.arange(0, BLOCK_N)[:, None] * (K * H) + columns(H)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=is_key)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=is_key)
