"""Decode attention as two Triton kernels: shares of both windows, and their sums.

Keys are ordered by distance d from the query: the near band (d < w_S) is the student's window, with
the far band (w_S <= d < w_T) it is the teacher's. A program takes a slice of one band, for the
query heads of one kv head, in tiles of keys by rising distance. A tile never holds two bands;
each key is read once, and keys outside the window or never written are not read.

A tile updates the softmax state m, l, acc of `dual_window.triton_kernels`, whose result, acc / l
with m + log2 l, is the slice's share of both windows (of the teacher's alone in the far band). A
second kernel adds up the shares, the near ones first, in a fixed order.

Arrays are contiguous: q [B, N, H]; caches [B, W, K, H]; shares [slices, B, N, H] and
[slices, B, N]. Offsets are 64 bit: caches may pass 2^31 elements.
"""

import triton
import triton.language as tl

from ttcd_kernels.columns import columns, inside

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def decode_attention(
    q_ptr, k_ptr, v_ptr, position_ptr, B, N, K, W, teacher_window, student_window, slice_keys,
    num_near, scale_log2, out_ptr, lse_log2_ptr,
    H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (slices, K, B): one slice's share for the N / K query heads of one kv head."""
    piece, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(position_ptr + batch)
    is_near = piece < num_near
    start = tl.where(is_near, piece * slice_keys, student_window + (piece - num_near) * slice_keys)
    stop = tl.minimum(start + slice_keys, tl.where(is_near, student_window, teacher_window))
    stop = tl.minimum(stop, position + 1)  # older keys were never written
    num_tiles = (tl.maximum(stop - start, 0) + BLOCK_N - 1) // BLOCK_N
    newest = position % W

    group = N // K
    member = tl.arange(0, BLOCK_G)
    is_head = member < group
    head = kv_head * group + member
    dim = columns(H)
    at_q = (tl.cast(batch, tl.int64) * N + head)[:, None] * H + dim[None, :]
    q = tl.load(q_ptr + at_q, mask=inside(is_head, H), other=0.0)

    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, triton.next_power_of_2(H)], tl.float32)
    for tile in range(0, num_tiles):
        distance = start + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_visible = distance < stop  # at least the first key: the peak is finite from here on
        slot = newest - distance
        slot = tl.where(slot < 0, slot + W, slot)
        row = tl.cast(batch, tl.int64) * W + slot
        at = row[:, None] * (K * H) + kv_head * H + dim[None, :]
        k = tl.load(k_ptr + at, mask=inside(is_visible, H), other=0.0)
        v = tl.load(v_ptr + at, mask=inside(is_visible, H), other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        score = tl.where(is_visible[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak

    share = (tl.cast(piece, tl.int64) * B + batch) * N + head
    out = acc / tl.where(total > 0, total, 1.0)[:, None]  # without a key: 0, and an lse of -inf
    tl.store(out_ptr + share[:, None] * H + dim[None, :], out, mask=inside(is_head, H))
    tl.store(lse_log2_ptr + share, peak + tl.log2(total), mask=is_head)


@triton.jit
def decode_merge(
    out_ptr, lse_log2_ptr, B, N, num_near, num_slices, teacher_ptr, student_ptr,
    teacher_lse_ptr, student_lse_ptr,
    H: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Grid (N, B, 1): both results of one head, in tiles of slices; zeros with an lse of -inf where
    no slice has a key."""
    row = tl.cast(tl.program_id(1), tl.int64) * N + tl.program_id(0)
    dim = columns(H)
    peak, total = float("-inf"), 0.0
    acc = tl.zeros([triton.next_power_of_2(H)], tl.float32)
    for band in tl.static_range(2):
        first = 0 if band == 0 else num_near
        stop = num_near if band == 0 else num_slices
        for start in range(first, stop, BLOCK_X):
            piece = start + tl.arange(0, BLOCK_X)
            share = tl.cast(piece, tl.int64) * B * N + row
            lse = tl.load(lse_log2_ptr + share, mask=piece < stop, other=float("-inf"))
            at = share[:, None] * H + dim[None, :]
            out = tl.load(out_ptr + at, mask=inside(piece < stop, H), other=0.0)
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weight, shrink = tl.exp2(lse - shift), tl.exp2(peak - shift)
            total = total * shrink + tl.sum(weight, 0)
            acc = acc * shrink + tl.sum(weight[:, None] * out, 0)
            peak = new_peak
        window_ptr = student_ptr if band == 0 else teacher_ptr
        window_lse_ptr = student_lse_ptr if band == 0 else teacher_lse_ptr
        result = (acc / tl.where(total > 0, total, 1.0)).to(window_ptr.dtype.element_ty)
        tl.store(window_ptr + row * H + dim, result, mask=dim < H)
        tl.store(window_lse_ptr + row, (peak + tl.log2(total)) * LN2)
