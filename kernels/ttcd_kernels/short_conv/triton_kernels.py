"""The convolved residual as Triton kernels: one launch forward, one backward.

With x = z_teacher or z_student, shift(r) = BEFORE - r, and zero outside the chunk and at tokens of
another segment:

    target, student = conv(x),  conv(x)_t = sum_r taps[r] x_{t - shift(r)}
    difference = target - student,  key = student / max(|student|, 1e-6) or student

*forward*: a program has a tile of tokens and takes their features block by block. It reads a tile's
rows, and the R - 1 around them, once per branch and convolves all its tokens in registers. A
normalised key needs the norm of the whole row, so a second loop recomputes the student's
convolution and writes the keys.

*backward*: with slope and along per token, which `triton_call.py` computes from the saved norms,

    g_T = d_difference + d_target,  g_S = slope (d_key - along key) - d_difference
    dx_t = sum_r taps[r] g_{t + shift(r)},  d_taps[r] = sum_t x_t g_{t + shift(r)}

A program walks along a span of tokens with the last R rows of both g in registers: each row is read
and formed once, and serves R tokens. It writes sums for d_taps of its own: no atomics.

Arrays are contiguous: z, results and cotangents [B, C, L, F], taps [B, R, F] float32, ids and row
facts [B, C, L]. Offsets of chunks are 64 bit: B C L F may pass 2^31.
"""

# pyright: reportGeneralTypeIssues=false
# (tl.static_range is a loop for Triton's compiler only)

import triton
import triton.language as tl

from ttcd_kernels import normalize

NORM_EPS = tl.constexpr(normalize.NORM_EPS)


@triton.jit
def _load_taps(taps_ptr, column, F: tl.constexpr, R: tl.constexpr):
    """The R taps, each a vector over features."""
    taps = ()
    for r in tl.static_range(R):
        taps += (tl.load(taps_ptr + r * F + column, mask=column < F, other=0.0),)
    return taps


@triton.jit
def _zeros(column, NUM: tl.constexpr):
    """NUM zero vectors shaped like `column`."""
    zeros = ()
    for _ in tl.static_range(NUM):
        zeros += (tl.zeros(column.shape, tl.float32),)
    return zeros


@triton.jit
def _load_row(chunk_ptr, row, column, is_row, F: tl.constexpr):
    at = tl.cast(row, tl.int64) * F + column
    return tl.load(chunk_ptr + at, mask=is_row & (column < F), other=0.0).to(tl.float32)


@triton.jit
def _store_row(chunk_ptr, value, row, column, is_row, F: tl.constexpr):
    at = tl.cast(row, tl.int64) * F + column
    value = value.to(chunk_ptr.dtype.element_ty)
    tl.store(chunk_ptr + at, value, mask=is_row & (column < F))


@triton.jit
def _load_rows(chunk_ptr, first, column, L, F: tl.constexpr, NUM: tl.constexpr):
    """The rows first .. first + NUM - 1 of a chunk; zeros outside of it."""
    rows = ()
    for j in tl.static_range(NUM):
        row = first + j
        rows += (_load_row(chunk_ptr, row, column, (row >= 0) & (row < L), F),)
    return rows


@triton.jit
def _load_ids(ids_ptr, first, L, NUM: tl.constexpr, HAS_SEGMENTS: tl.constexpr):
    """NUM scalars: the segments of rows first .. first + NUM - 1. Nothing without segments."""
    ids = ()
    if HAS_SEGMENTS:
        for j in tl.static_range(NUM):
            row = first + j
            ids += (tl.load(ids_ptr + row, mask=(row >= 0) & (row < L), other=0),)
    return ids


@triton.jit
def _reached(rows, ids, there: tl.constexpr, here: tl.constexpr, HAS_SEGMENTS: tl.constexpr):
    """Row `there`, or zeros if it belongs to another segment than row `here`."""
    if HAS_SEGMENTS:
        return tl.where(ids[there] == ids[here], rows[there], 0.0)
    else:
        return rows[there]


@triton.jit
def _convolve(
    rows,
    taps,
    ids,
    t: tl.constexpr,
    dtype: tl.constexpr,
    R: tl.constexpr,
    BEFORE: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
):
    """Token t's convolution, where rows[t + BEFORE] is the token's own: float32, rounded to
    `dtype`."""
    total = taps[0] * _reached(rows, ids, t, t + BEFORE, HAS_SEGMENTS)
    for r in tl.static_range(1, R):
        total += taps[r] * _reached(rows, ids, t + r, t + BEFORE, HAS_SEGMENTS)
    return total.to(dtype).to(tl.float32)


@triton.jit
def short_conv_residual_forward(
    teacher_ptr,
    student_ptr,
    teacher_taps_ptr,
    student_taps_ptr,
    ids_ptr,
    C,
    L,
    difference_ptr,
    target_ptr,
    key_ptr,
    norm_ptr,
    F: tl.constexpr,
    R: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    NORMALIZES: tl.constexpr,
):
    """Grid (token tiles, C, B): all features of BLOCK_L tokens. norm [B, C, L] is |student|, with
    NORMALIZES only."""
    ROWS: tl.constexpr = BLOCK_L + R - 1
    dtype: tl.constexpr = key_ptr.dtype.element_ty
    tile, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tile * BLOCK_L
    row_base = (tl.cast(batch, tl.int64) * C + chunk) * L
    base = row_base * F
    taps_base = tl.cast(batch, tl.int64) * R * F
    ids = _load_ids(ids_ptr + row_base, first - BEFORE, L, ROWS, HAS_SEGMENTS)

    squares = _zeros(tl.arange(0, BLOCK_F), BLOCK_L)
    for start in range(0, F, BLOCK_F):
        column = start + tl.arange(0, BLOCK_F)
        teacher_taps = _load_taps(teacher_taps_ptr + taps_base, column, F, R)
        student_taps = _load_taps(student_taps_ptr + taps_base, column, F, R)
        teacher_rows = _load_rows(teacher_ptr + base, first - BEFORE, column, L, F, ROWS)
        student_rows = _load_rows(student_ptr + base, first - BEFORE, column, L, F, ROWS)
        new_squares = ()
        for t in tl.static_range(BLOCK_L):
            row = first + t
            is_row = row < L
            target = _convolve(teacher_rows, teacher_taps, ids, t, dtype, R, BEFORE, HAS_SEGMENTS)
            student = _convolve(student_rows, student_taps, ids, t, dtype, R, BEFORE, HAS_SEGMENTS)
            _store_row(target_ptr + base, target, row, column, is_row, F)
            _store_row(difference_ptr + base, target - student, row, column, is_row, F)
            if NORMALIZES:
                new_squares += (squares[t] + student * student,)
            else:
                _store_row(key_ptr + base, student, row, column, is_row, F)
        if NORMALIZES:
            squares = new_squares

    if NORMALIZES:
        scales = ()
        for t in tl.static_range(BLOCK_L):
            norm = tl.sqrt(tl.sum(squares[t], 0))
            tl.store(norm_ptr + row_base + first + t, norm, mask=first + t < L)
            scales += (1 / tl.maximum(norm, NORM_EPS),)
        # In reverse: the features read last are still in the cache.
        for step in range(0, F, BLOCK_F):
            column = (F - 1) // BLOCK_F * BLOCK_F - step + tl.arange(0, BLOCK_F)
            taps = _load_taps(student_taps_ptr + taps_base, column, F, R)
            rows = _load_rows(student_ptr + base, first - BEFORE, column, L, F, ROWS)
            for t in tl.static_range(BLOCK_L):
                student = _convolve(rows, taps, ids, t, dtype, R, BEFORE, HAS_SEGMENTS)
                key = student * scales[t]
                _store_row(key_ptr + base, key, first + t, column, first + t < L, F)


@triton.jit
def _cotangents(
    d_difference_ptr,
    d_target_ptr,
    d_key_ptr,
    key_ptr,
    slope_ptr,
    along_ptr,
    row,
    column,
    is_row,
    F: tl.constexpr,
    NORMALIZES: tl.constexpr,
):
    """One row of g_T and g_S; zeros where there is none."""
    d_difference = _load_row(d_difference_ptr, row, column, is_row, F)
    d_student = _load_row(d_key_ptr, row, column, is_row, F)
    if NORMALIZES:
        slope = tl.load(slope_ptr + row, mask=is_row, other=0.0)
        along = tl.load(along_ptr + row, mask=is_row, other=0.0)
        d_student = slope * (d_student - along * _load_row(key_ptr, row, column, is_row, F))
    d_target = _load_row(d_target_ptr, row, column, is_row, F)
    return d_difference + d_target, d_student - d_difference


@triton.jit
def _gather(
    rows, taps, sums, z, ids, R: tl.constexpr, AFTER: tl.constexpr, HAS_SEGMENTS: tl.constexpr
):
    """(dz of one token, sums for d_taps with it) from the rows of g that it reached; rows[AFTER] is
    the token's own."""
    dz = tl.zeros(z.shape, tl.float32)
    new_sums = ()
    for r in tl.static_range(R):
        g = _reached(rows, ids, R - 1 - r, AFTER, HAS_SEGMENTS)
        dz += taps[r] * g
        new_sums += (sums[r] + z * g,)
    return dz, new_sums


@triton.jit
def short_conv_residual_backward(
    teacher_ptr,
    student_ptr,
    teacher_taps_ptr,
    student_taps_ptr,
    ids_ptr,
    key_ptr,
    slope_ptr,
    along_ptr,
    d_difference_ptr,
    d_target_ptr,
    d_key_ptr,
    C,
    L,
    d_teacher_ptr,
    d_student_ptr,
    d_teacher_taps_ptr,
    d_student_taps_ptr,
    F: tl.constexpr,
    R: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_F: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    NORMALIZES: tl.constexpr,
):
    """Grid (feature blocks * spans, C, B): dz of both branches for BLOCK_L tokens of one block of
    features, and their summands of d_taps [B, C, spans, R, F] float32."""
    AFTER: tl.constexpr = R - 1 - BEFORE
    NUM_BLOCKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    block, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = block // NUM_BLOCKS
    column = block % NUM_BLOCKS * BLOCK_F + tl.arange(0, BLOCK_F)
    row_base = (tl.cast(batch, tl.int64) * C + chunk) * L
    base = row_base * F
    taps_base = tl.cast(batch, tl.int64) * R * F
    teacher_taps = _load_taps(teacher_taps_ptr + taps_base, column, F, R)
    student_taps = _load_taps(student_taps_ptr + taps_base, column, F, R)
    teacher_sums, student_sums = _zeros(column, R), _zeros(column, R)

    # The last R rows of g; the first R - 1 steps only fill them and write nothing.
    teacher_rows, student_rows = _zeros(column, R), _zeros(column, R)
    first = span * BLOCK_L
    ids = _load_ids(ids_ptr + row_base, first - AFTER - R, L, R, HAS_SEGMENTS)
    for ahead in range(first - AFTER, tl.minimum(first + BLOCK_L, L) + BEFORE):
        is_row = (ahead >= 0) & (ahead < L)
        g_teacher, g_student = _cotangents(
            d_difference_ptr + base,
            d_target_ptr + base,
            d_key_ptr + base,
            key_ptr + base,
            slope_ptr + row_base,
            along_ptr + row_base,
            ahead,
            column,
            is_row,
            F,
            NORMALIZES,
        )
        teacher_rows, student_rows, ids = teacher_rows[1:], student_rows[1:], ids[1:]
        teacher_rows += (g_teacher,)
        student_rows += (g_student,)
        ids += _load_ids(ids_ptr + row_base, ahead, L, 1, HAS_SEGMENTS)
        row = ahead - BEFORE
        is_due = row >= first
        z_teacher = _load_row(teacher_ptr + base, row, column, is_due, F)
        z_student = _load_row(student_ptr + base, row, column, is_due, F)
        d_teacher, teacher_sums = _gather(
            teacher_rows, teacher_taps, teacher_sums, z_teacher, ids, R, AFTER, HAS_SEGMENTS
        )
        d_student, student_sums = _gather(
            student_rows, student_taps, student_sums, z_student, ids, R, AFTER, HAS_SEGMENTS
        )
        _store_row(d_teacher_ptr + base, d_teacher, row, column, is_due, F)
        _store_row(d_student_ptr + base, d_student, row, column, is_due, F)

    spans = (L + BLOCK_L - 1) // BLOCK_L
    sums_base = (((tl.cast(batch, tl.int64) * C + chunk) * spans) + span) * R * F
    for r in tl.static_range(R):
        at = sums_base + r * F + column
        tl.store(d_teacher_taps_ptr + at, teacher_sums[r], mask=column < F)
        tl.store(d_student_taps_ptr + at, student_sums[r], mask=column < F)
