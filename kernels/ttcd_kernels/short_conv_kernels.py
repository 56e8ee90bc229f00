"""The convolved residual of a chunk as Triton kernels: one launch forward, one backward.

With x = z_teacher or z_student, and zeros outside of the chunk and in another segment:

    target, student = conv(x),  conv(x)_t = sum_r taps[r] x_{t + r - BEFORE}
    difference = target - student,  key = student / max(|student|, 1e-6) or student

*forward*: a program has whole rows, so that a norm is a sum inside of it. Terms are added in the
order of the taps, and rounded where XLA's form rounds: target and difference have its bits, and so
has a key whose squares add up without rounding (otherwise the order of that sum differs).

*backward*: with slope and along of every token (`short_conv_call.py`),

    g_T = d_difference + d_target,  g_S = slope (d_key - along key) - d_difference
    dx_t = sum_r taps[r] g_{t + BEFORE - r},  d_taps[r] = sum_t x_t g_{t + BEFORE - r}

A program walks along a span of tokens with one block of features, and writes its own summands of
d_taps: no atomics.

Arrays are contiguous: z, results and cotangents [B, C, L, F], taps [B, R, F] float32, ids, norms,
slope and along [B, C, L]. Offsets of chunks are 64 bit: B C L F may pass 2^31. The R shifted copies
of a tile are loads of the same cache lines.
"""

# pyright: reportGeneralTypeIssues=false
# (tl.static_range is a loop for Triton's compiler only)

import triton
import triton.language as tl

from ttcd_kernels import normalize
from ttcd_kernels.columns import columns

NORM_EPS = tl.constexpr(normalize.NORM_EPS)


@triton.jit
def _load(base, row, is_row, column, F: tl.constexpr):
    mask = is_row[:, None] & (column < F)[None, :]
    return tl.load(base + row[:, None] * F + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(base, row, is_row, column, value, F: tl.constexpr):
    mask = is_row[:, None] & (column < F)[None, :]
    tl.store(base + row[:, None] * F + column, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _reached(ids_ptr, row, there, L, HAS_SEGMENTS: tl.constexpr):
    """Which rows have the row `there` in their chunk and segment."""
    is_there = (row < L) & (there >= 0) & (there < L)
    if HAS_SEGMENTS:
        ids = tl.load(ids_ptr + row, mask=row < L, other=0)
        is_there = is_there & (tl.load(ids_ptr + there, mask=is_there, other=0) == ids)
    return is_there


@triton.jit
def _tap(taps_ptr, r, column, F: tl.constexpr):
    return tl.load(taps_ptr + r * F + column, mask=column < F, other=0.0)[None, :]


@triton.jit
def _term(base, taps_ptr, ids_ptr, row, column, L, there, r, F: tl.constexpr, IDS: tl.constexpr):
    x = _load(base, there, _reached(ids_ptr, row, there, L, IDS), column, F)
    return x * _tap(taps_ptr, r, column, F)


@triton.jit
def _convolved(
    base, taps_ptr, ids_ptr, row, column, L,
    F: tl.constexpr, R: tl.constexpr, BEFORE: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Rows of conv(x), accumulated in float32, rounded to the dtype of x. A loop: unrolled, all
    rows of all taps would be in registers at once."""
    total = _term(base, taps_ptr, ids_ptr, row, column, L, row - BEFORE, 0, F, IDS)
    for r in range(1, R):
        total += _term(base, taps_ptr, ids_ptr, row, column, L, row + r - BEFORE, r, F, IDS)
    return total.to(base.dtype.element_ty).to(tl.float32)


@triton.jit
def short_conv_residual_forward(
    teacher_ptr, student_ptr, teacher_taps_ptr, student_taps_ptr, ids_ptr, C, L,
    difference_ptr, target_ptr, key_ptr, norm_ptr,
    F: tl.constexpr, R: tl.constexpr, BEFORE: tl.constexpr, BLOCK_L: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens, C, B). norm is |student|, written with NORMALIZES only."""
    tile, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = (tl.cast(batch, tl.int64) * C + chunk) * L
    base, ids_ptr, taps = tokens * F, ids_ptr + tokens, batch * R * F
    row, column = tile * BLOCK_L + tl.arange(0, BLOCK_L), columns(F)
    where = ids_ptr, row, column, L
    target = _convolved(
        teacher_ptr + base, teacher_taps_ptr + taps, *where, F, R, BEFORE, HAS_SEGMENTS
    )
    student = _convolved(
        student_ptr + base, student_taps_ptr + taps, *where, F, R, BEFORE, HAS_SEGMENTS
    )
    _store(target_ptr + base, row, row < L, column, target, F)
    _store(difference_ptr + base, row, row < L, column, target - student, F)
    if NORMALIZES:
        norm = tl.sqrt_rn(tl.sum(student * student, 1))
        tl.store(norm_ptr + tokens + row, norm, mask=row < L)
        student = student * tl.div_rn(1.0, tl.maximum(norm, NORM_EPS))[:, None]
    _store(key_ptr + base, row, row < L, column, student, F)


@triton.jit
def short_conv_residual_backward(
    teacher_ptr, student_ptr, teacher_taps_ptr, student_taps_ptr, ids_ptr, key_ptr, slope_ptr,
    along_ptr, d_difference_ptr, d_target_ptr, d_key_ptr, C, L,
    d_teacher_ptr, d_student_ptr, sums_ptr,
    F: tl.constexpr, R: tl.constexpr, BEFORE: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr, SPAN: tl.constexpr, HAS_SEGMENTS: tl.constexpr,
    NORMALIZES: tl.constexpr,
):  # fmt: skip
    """Grid (feature blocks * spans, C, B): dz of both branches for SPAN tokens, and their summands
    [B, C * spans, 2, R, F] of d_taps, the teacher's first."""
    NUM_BLOCKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    span, chunk, batch = tl.program_id(0) // NUM_BLOCKS, tl.program_id(1), tl.program_id(2)
    column = tl.program_id(0) % NUM_BLOCKS * BLOCK_F + tl.arange(0, BLOCK_F)
    chunk = tl.cast(batch, tl.int64) * C + chunk
    tokens, taps = chunk * L, batch * R * F
    base, ids_ptr = tokens * F, ids_ptr + tokens
    teacher_sums, student_sums = (), ()
    for _ in tl.static_range(R):
        teacher_sums += (tl.zeros([BLOCK_L, BLOCK_F], tl.float32),)
        student_sums += (tl.zeros([BLOCK_L, BLOCK_F], tl.float32),)
    for tile in range(0, tl.cdiv(tl.minimum(L - span * SPAN, SPAN), BLOCK_L)):
        row = span * SPAN + tile * BLOCK_L + tl.arange(0, BLOCK_L)
        z_teacher = _load(teacher_ptr + base, row, row < L, column, F)
        z_student = _load(student_ptr + base, row, row < L, column, F)
        d_teacher, d_student = tl.zeros_like(z_teacher), tl.zeros_like(z_student)
        new_teacher, new_student = (), ()
        for r in tl.static_range(R):
            there = row + BEFORE - r
            is_there = _reached(ids_ptr, row, there, L, HAS_SEGMENTS)
            where = there, is_there, column, F
            d_difference = _load(d_difference_ptr + base, *where)
            g_teacher = d_difference + _load(d_target_ptr + base, *where)
            g_student = _load(d_key_ptr + base, *where)
            if NORMALIZES:
                slope = tl.load(slope_ptr + tokens + there, mask=is_there, other=0.0)[:, None]
                along = tl.load(along_ptr + tokens + there, mask=is_there, other=0.0)[:, None]
                g_student = slope * (g_student - along * _load(key_ptr + base, *where))
            g_student -= d_difference
            d_teacher += g_teacher * _tap(teacher_taps_ptr + taps, r, column, F)
            d_student += g_student * _tap(student_taps_ptr + taps, r, column, F)
            new_teacher += (teacher_sums[r] + z_teacher * g_teacher,)
            new_student += (student_sums[r] + z_student * g_student,)
        teacher_sums, student_sums = new_teacher, new_student
        _store(d_teacher_ptr + base, row, row < L, column, d_teacher, F)
        _store(d_student_ptr + base, row, row < L, column, d_student, F)
    sums_ptr += (chunk * (tl.num_programs(0) // NUM_BLOCKS) + span) * 2 * R * F
    for r in tl.static_range(R):
        at = sums_ptr + r * F + column
        tl.store(at, tl.sum(teacher_sums[r], 0), mask=column < F)
        tl.store(at + R * F, tl.sum(student_sums[r], 0), mask=column < F)
