"""Tile sizes of the Triton kernels by GPU, and the candidates for others."""

import itertools
from typing import NamedTuple


class Tile(NamedTuple):
    """The tile of one kernel: tokens of a chunk per program, features at a time, warps."""

    block_l: int
    block_f: int
    num_warps: int


class Tuning(NamedTuple):
    """Tiles by kernel. A program of the forward keeps all its tokens in registers, one block of
    features after the other; one of the backward walks along its tokens with one block."""

    forward: Tile
    backward: Tile


# By compute capability. Chosen by the reports of the compiler (`ttcd_kernels.aot`: registers,
# spills), not yet by time on a GPU. Blocks of 256 divide 2816 and 4096. Forward: 16 tokens with
# documents spill everywhere; 8 tokens spill some bytes with 4 warps on Hopper and with 2 before.
# Backward: 4 features per thread (2 warps) would take 148 to 215 registers, 2 take 80 to 96.
TABLE: dict[int, Tuning] = {
    90: Tuning(Tile(8, 256, 2), Tile(128, 256, 4)),
    80: Tuning(Tile(8, 256, 4), Tile(128, 256, 4)),
}

# Tried for each kernel by `ttcd_kernels.tune`, alongside the table's.
CANDIDATES = {
    kernel: tuple(itertools.starmap(Tile, itertools.product(lengths, (128, 256, 512), (2, 4))))
    for kernel, lengths in {"forward": (4, 8, 16), "backward": (64, 128, 256)}.items()
}


def tuning_for(capability: int) -> Tuning:
    """The table's row for the newest listed GPU that is no newer than `capability`."""
    return TABLE[max(listed for listed in TABLE if listed <= capability)]
