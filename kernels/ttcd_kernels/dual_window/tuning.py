"""Tile sizes of the kernels by GPU and head dimension, and the candidates for others."""

import itertools
from typing import NamedTuple


class Tile(NamedTuple):
    """The tile of one kernel: queries and keys, warps that compute (Mosaic's share the rows of a
    block), software pipeline depth (tiles loaded ahead)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Tuning(NamedTuple):
    """Tiles by kernel."""

    forward: Tile
    backward_q: Tile
    backward_kv: Tile


# By (compute capability, head dim), for operands of two bytes. Chosen by the compiler's reports
# (`tests/machine_code`: registers, spills, shared memory), not by time on a GPU.
TABLE: dict[tuple[int, int], Tuning] = {
    (90, 128): Tuning(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
    (90, 64): Tuning(Tile(128, 128, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
    (90, 32): Tuning(Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), Tile(32, 128, 8, 2)),
    (80, 128): Tuning(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 4, 2)),
    (80, 64): Tuning(Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    (80, 32): Tuning(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(32, 64, 4, 2)),
}
# On 10.0 the tiles of 9.0 spill; on 12.0 a block has 99 KiB of shared memory, as on 8.6 and 8.9.
TABLE |= {(gpu, head_dim): TABLE[80, head_dim] for gpu in (100, 120) for head_dim in (32, 64, 128)}
# On 10.0 those of 8.0 spill 136 bytes at 32 and 1,152 at 128, with documents.
TABLE[100, 32] = TABLE[80, 32]._replace(forward=Tile(128, 64, 8, 3))
TABLE[100, 128] = TABLE[80, 128]._replace(backward_kv=Tile(32, 32, 4, 2))
# 80 and 96 are padded to 128 columns, inside the kernels.
TABLE |= {(gpu, dim): TABLE[gpu, 128] for gpu in (80, 90, 100, 120) for dim in (80, 96)}
HEAD_DIMS = (32, 64, 80, 96, 128)
# Operands of four bytes, which are multiplied as three products in TF32; for every GPU.
_FLOAT32 = {dim: Tile(32, 32, *((4, 2) if dim <= 64 else (8, 1))) for dim in HEAD_DIMS}
FLOAT32 = {(80, dim): Tuning(tile, tile, tile) for dim, tile in _FLOAT32.items()}
for _dim in (80, 96, 128):  # 32 queries would spill 1,392 bytes
    FLOAT32[80, _dim] = FLOAT32[80, _dim]._replace(backward_q=Tile(16, 32, 4, 1))

# Tried for each kernel by `ttcd_kernels.tune`, alongside the table's.
_BLOCKS = (32, 128), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128)
_SIZES = (Tile(*block, *more) for block in _BLOCKS for more in itertools.product((4, 8), (2, 3)))
CANDIDATES = dict.fromkeys(Tuning._fields, tuple(_SIZES))

# Mosaic's, for Hopper, by head dim; chosen by the reports of the assembler, not by time.
COMPUTE_WARPGROUPS = 2
MOSAIC_TILES = {
    64: Tuning(Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), Tile(64, 128, 8, 4)),
    128: Tuning(Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
}


def tuning_for(capability: int, head_dim: int, itemsize: int) -> Tuning:
    """The row for operands of `itemsize` bytes of the newest listed GPU that is no newer than
    `capability`."""
    table = TABLE if itemsize == 2 else FLOAT32
    known = max(listed for listed, _ in table if listed <= capability)
    return table[known, head_dim]
