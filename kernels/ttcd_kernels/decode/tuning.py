"""Tile sizes of the decode kernel, and the number of programs of a call."""

import itertools
from typing import NamedTuple


class Tile(NamedTuple):
    """The kernel's tile: keys, warps, software pipeline depth, and programs that fill the GPU."""

    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int


class Tuning(NamedTuple):
    """Tiles by kernel."""

    decode_attention: Tile


# By (compute capability, head dim), for operands of two bytes. A program keeps two tiles of K and
# of V in flight (three stages), up to 16 KiB each, and two programs share a multiprocessor: H100
# and H200 have 132, A100 108. Chosen by the reports of the compiler, not by time on a GPU.
# Heads of 80 and 96 are padded to 128 columns, inside the kernel.
HEAD_DIMS = (32, 64, 80, 96, 128)
TABLE = {
    (gpu, dim): Tile(128 if dim <= 64 else 64, 4, 3, 2 * multiprocessors)
    for gpu, multiprocessors in ((80, 108), (90, 132))
    for dim in HEAD_DIMS
}

# Tried by `ttcd_kernels.tune`, alongside the table's.
_SIZES = itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4), (132, 264, 528))
CANDIDATES = {"decode_attention": tuple(itertools.starmap(Tile, _SIZES))}


def tuning_for(capability: int, head_dim: int, itemsize: int) -> Tuning:
    """The table's row for the newest listed GPU that is no newer than `capability`; for operands of
    four bytes, whose products use no tensor cores, with half the tile and twice the warps."""
    known = max(listed for listed, _ in TABLE if listed <= capability)
    tile = TABLE[known, head_dim]
    if itemsize >= 4:
        tile = tile._replace(block_n=tile.block_n // 2, num_warps=2 * tile.num_warps)
    return Tuning(tile)


class Slices(NamedTuple):
    """A row's keys, divided among programs: slices of one band each, the near ones first."""

    keys: int  # per slice
    near: int  # slices of the student's window
    far: int  # slices of the rest of the teacher's


def slices_for(tile: Tile, batch_kv_heads: int, teacher_window: int, student_window: int) -> Slices:
    """The shortest slices, in whole tiles, that make at most `num_programs` programs; one slice per
    band where that already makes more."""
    far_window = teacher_window - student_window
    keys = tile.block_n
    while True:
        slices = Slices(keys, -(-student_window // keys), -(-far_window // keys))
        programs = batch_kv_heads * (slices.near + slices.far)
        if programs <= tile.num_programs or keys >= max(student_window, far_window):
            return slices
        keys += tile.block_n
