"""Dual-window attention's forward for Hopper, in Pallas Mosaic GPU: wgmma products, TMA copies and
specialised warpgroups.

The algorithm is that of `triton_kernels.dual_window_forward`: key tiles update one softmax state,
which after the near band (distance < w_S) is the student's result and after the far band (w_S <=
distance < w_T) the teacher's. Tiles that the student's edge cuts are visited twice, once for each
band. A block computes one query tile of one head. Its two compute
warpgroups take turns: while one multiplies, the other is in its softmax. They meet twice per tile,

    scores of a tile started - meet - softmax - meet - its values multiplied - next tile

the second of them half a tile late.

Arrays: q and outputs [B, T, N, H], k and v [B, S, K, H], lse [B, N, T] float32; T is a multiple of
`block_q`, S of `block_kv`. Query row t has position t + `halo`. Of `tiles` see `tiles.key_tiles`;
ids [B, at least the largest position of a tile].
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ttcd_kernels.dual_window import mosaic_block
from ttcd_kernels.dual_window.mosaic_block import Facts, QueryBlock, by_row
from ttcd_kernels.dual_window.tuning import COMPUTE_WARPGROUPS
from ttcd_kernels.launch import LOG2E

KERNEL_NAME = "dual_window_forward"  # Mosaic adds _mosaic_gpu
_LN2 = 0.6931471805599453

# peak [rows] in base 2 and after scaling, total [rows], acc [rows, H]; float32.
type _State = tuple[jax.Array, jax.Array, jax.Array]


def dual_window_forward(facts: Facts, operands: dict[str, jax.Array]) -> list[jax.Array]:
    """out and lse after each band, nearest first, from q, k, v, tiles and ids. The scale is above
    0."""
    q, k = operands["q"], operands["k"]
    B, T, N, H = q.shape
    tile, dtype, layout = facts.tile, q.dtype, mosaic_block.layout()
    assert T % tile.block_q == 0
    assert k.shape[1] % tile.block_kv == 0
    rows = COMPUTE_WARPGROUPS, tile.block_q // COMPUTE_WARPGROUPS
    ring = tile.num_stages, tile.block_kv, H
    scratch: dict[str, Any] = mosaic_block.ring(tile.num_stages, k=1, v=1) | {
        "q_smem": plgpu.SMEM((*rows, H), dtype, transforms=layout),
        "k_smem": plgpu.SMEM(ring, dtype, transforms=layout),
        "v_smem": plgpu.SMEM(ring, dtype, transforms=layout),
        "out_smem": plgpu.SMEM((*rows, H), dtype, transforms=layout),
        "lse_smem": plgpu.SMEM(rows, jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
        "turn": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
    }
    if facts.interpret:
        scratch["staged_smem"] = plgpu.SMEM((*rows, tile.block_kv), dtype, transforms=layout)
    results: dict[str, jax.ShapeDtypeStruct] = {}
    for band in range(len(facts.bands)):
        results[f"out {band}"] = jax.ShapeDtypeStruct(q.shape, dtype)
        results[f"lse {band}"] = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    grid = B, N, T // tile.block_q
    return mosaic_block.launch_blocks(_Block, facts, operands, results, scratch, grid, KERNEL_NAME)


class _Block(QueryBlock):
    """A block of the forward."""

    def compute(self) -> None:
        self.fetch("q", self.q.at[self.batch, self.rows, self.head])
        self.wait("q_ready", self.warpgroup)
        one_a_row = plgpu.Layout.WGMMA.reduce(1)
        state: _State = (
            plgpu.layout_cast(jnp.full((self.num_rows,), -jnp.inf, jnp.float32), one_a_row),
            plgpu.layout_cast(jnp.zeros((self.num_rows,), jnp.float32), one_a_row),
            mosaic_block.zeros(self.num_rows, self.q.shape[-1]),
        )
        self.wait("k_ready", 0)
        pl.when(self.warpgroup == 1)(self._meet)
        step = jnp.int32(0)
        for band in range(len(self.facts.bands)):
            step, state = self.sweep(band, step, state, functools.partial(self._attend, band))
            self._write(state, self.refs[f"out {band}"], self.refs[f"lse {band}"])
        pl.when(self.warpgroup == 0)(self._meet)
        plgpu.wait_smem_to_gmem(0)

    def _meet(self) -> None:
        plgpu.barrier_arrive(self.scratch["turn"])
        plgpu.barrier_wait(self.scratch["turn"])

    def _attend(self, band: int, state: _State, step: jax.Array, tile: jax.Array | None) -> _State:
        """The state after one tile, which is masked if it is given."""
        peak, total, acc = state
        scale, slot = self.facts.scale * LOG2E, self.slot(step)
        score = self._scores(slot)
        self.arrive("k_free", slot)
        if tile is not None:
            score = jnp.where(self.sees(tile, band), score, -jnp.inf)
        # Scaled inside the exponential, where it is one fused multiply and add.
        new_peak = jnp.maximum(peak, score.max(axis=1) * scale)
        shift = new_peak
        if tile is not None:
            # A row that has seen no key yet has weights of 0, not 2^(inf - inf).
            shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        shrink = jnp.exp2(peak - shift)
        weight = jnp.exp2(score * scale - by_row(shift, score.shape))
        total = total * shrink + weight.sum(axis=1)
        acc = acc * by_row(shrink, acc.shape)
        narrow = weight.astype(self.q.dtype)
        # The softmax ends here, before the other warpgroup is let in.
        acc, total, new_peak, narrow = lax.optimization_barrier((acc, total, new_peak, narrow))
        plgpu.barrier_arrive(self.scratch["turn"])
        self.wait("v_ready", slot)
        plgpu.barrier_wait(self.scratch["turn"])

        def await_next_keys() -> None:
            @pl.when(step + 1 < self.num_steps)
            def _() -> None:
                self.wait("k_ready", self.slot(step + 1))

        values = self.scratch["v_smem"].at[slot]
        (acc,) = mosaic_block.add_products([(acc, narrow, values)], self.staged, await_next_keys)
        self.arrive("v_free", slot)
        return new_peak, total, acc

    def _scores(self, slot: jax.Array) -> jax.Array:
        """q k^T of one tile [rows, block_kv], unscaled; once the product has started, the other
        warpgroup takes its turn."""

        def product(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, self.own("q_smem"), self.scratch["k_smem"].at[slot].transpose((1, 0)))
            self._meet()
            return acc[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(self.shape))

    def _write(self, state: _State, out: Any, lse: Any) -> None:
        """Writes the state as out and lse, through shared memory."""
        peak, total, acc = state
        out_smem, lse_smem = self.own("out_smem"), self.own("lse_smem")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the student's copy may still read it
        out_smem[...] = (acc * by_row(1.0 / total, acc.shape)).astype(out.dtype)
        lse_smem[...] = peak * _LN2 + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[self.batch, self.rows, self.head])
        plgpu.copy_smem_to_gmem(lse_smem, lse.at[self.batch, self.head, self.rows])
