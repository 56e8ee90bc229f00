"""Columns of a head in Triton kernels, whose arrays have sizes that are powers of two.

A head dim of 80 or 96 takes 128 columns in registers and shared memory, of which those from H on
are never loaded (they are zeros) nor stored. Arrays in device memory have H columns.
"""

import triton
import triton.language as tl


@triton.jit
def columns(H: tl.constexpr):
    """0, 1, ... up to the smallest power of two that is at least H."""
    return tl.arange(0, triton.next_power_of_2(H))


@triton.jit
def inside(is_row, H: tl.constexpr):
    """The mask of the elements of these rows [X] that exist: [X, columns], or [X, 1] where all
    columns do."""
    if triton.next_power_of_2(H) == H:
        return is_row[:, None]
    else:
        return is_row[:, None] & (columns(H) < H)[None, :]
