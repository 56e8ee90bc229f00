"""Dual-window attention's forward for Hopper, in Pallas Mosaic GPU: wgmma products, TMA copies and
specialised warpgroups.

The algorithm is that of `triton_kernels.dual_window_forward`. Tiles that the student's edge cuts
are visited twice, once for each band. A block computes one query tile of one head.

Products and softmax overlap twice. A compute warpgroup starts the scores of a tile and the product
of the tile before, P v, together, and is in the softmax of the former while the latter runs: its
state is behind by one product. And the two take turns, the second half a tile late: while one is in
its softmax, the other multiplies. They meet twice per tile,

    scores and the product before started - meet - softmax - meet - next tile

Arrays: q and outputs [B, T, N, H], k and v [B, S, K, H], lse [B, N, T] float32; T is a multiple of
`block_m`, S of `block_n`. Query row t has position t + `halo`. Of `tiles` see `tiles.visits`;
ids [B, at least the largest position of a tile].
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ttcd_kernels.dual_window.mosaic_block import QueryBlock, Static, matrices
from ttcd_kernels.dual_window.tuning import COMPUTE_WARPGROUPS
from ttcd_kernels.launch import LOG2E

_LN2 = 0.6931471805599453

# peak [rows] in base 2 and after scaling, total [rows], acc [rows, H], float32, without the product
# of the last tile; its weights [rows, block_n] as operands.
type _State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def dual_window_forward(static: Static, operands: dict[str, jax.Array]) -> list[jax.Array]:
    """out and lse after each band, nearest first, from q, k, v, tiles and ids. The scale is above
    0."""
    q = operands["q"]
    B, T, N, H = q.shape
    own = COMPUTE_WARPGROUPS, static.tile.block_m // COMPUTE_WARPGROUPS
    results: dict[str, Any] = {}
    for band in range(len(static.bands)):
        results[f"out{band}"] = jax.ShapeDtypeStruct(q.shape, q.dtype)
        results[f"lse{band}"] = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    buffers = {"out_smem": matrices(q.dtype, *own, H), "lse_smem": plgpu.SMEM(own, jnp.float32)}
    buffers["turn"] = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS)
    return _Forward.launch("dual_window_forward", static, operands, results, **buffers)


class _Forward(QueryBlock):
    """A block of the forward."""

    lags: ClassVar[dict[str, int]] = {"v": 1}

    def compute(self) -> None:
        before = self.zeros(self.shape[1]).astype(self.dtype)
        state = self._full(-jnp.inf), self._full(0.0), self.zeros(self.head_dim), before
        self.wait("k_ready", 0)
        self.wait("v_ready", 0)  # the first tile has none before it: 0 v
        pl.when(self.warpgroup == 1)(self._meet)
        step = jnp.int32(0)
        for band in range(len(self.static.bands)):
            step, state = self.sweep(band, step, state, functools.partial(self._attend, band))
            self._write(state, step - 1, self.refs[f"out{band}"], self.refs[f"lse{band}"])
        self.arrive("v_free", self.slot(step - 1))
        pl.when(self.warpgroup == 0)(self._meet)

    def _full(self, value: float) -> jax.Array:
        """[rows]."""
        row = jnp.full((self.shape[0],), value, jnp.float32)
        return plgpu.layout_cast(row, plgpu.Layout.WGMMA.reduce(1))

    def _meet(self) -> None:
        plgpu.barrier_arrive(self.scratch["turn"])
        plgpu.barrier_wait(self.scratch["turn"])

    def _attend(self, band: int, state: _State, step: jax.Array, tile: jax.Array | None) -> _State:
        """The state after one tile, which is masked if it is given."""
        peak, total, acc, before = state
        scale, slot = self.static.scale * LOG2E, self.slot(step)

        def softmax(score: jax.Array) -> tuple[jax.Array, ...]:
            self.arrive("k_free", slot)
            if tile is not None:
                score = jnp.where(self.visible(tile, band), score, -jnp.inf)
            # Scaled inside the exponential, where it is one fused multiply and add.
            new_peak = jnp.maximum(peak, score.max(axis=1) * scale)
            shift = new_peak
            if tile is not None:
                # A row that has seen no key yet has weights of 0, not 2^(inf - inf).
                shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            shrink = jnp.exp2(peak - shift)
            weight = jnp.exp2(score * scale - self.spread(shift, 0))
            results = new_peak, total * shrink + weight.sum(axis=1), shrink, weight
            # Here because these are branches: the assembler would put the exponentials behind the
            # wait for the product that they are to overlap.
            results = lax.optimization_barrier(results)
            pl.when(step > 0)(lambda: self.wait("v_ready", slot))
            pl.when(step + 1 < self.num_steps)(lambda: self.wait("k_ready", self.slot(step + 1)))
            return results

        acc, new_peak, total, shrink, weight = self._products(acc, before, step, softmax)
        pl.when(step > 0)(lambda: self.arrive("v_free", self.slot(step - 1)))
        # Not rounded while the product reads the weights before, which have the same registers.
        acc, weight = lax.optimization_barrier((acc, weight))
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        state = new_peak, total, acc, weight.astype(self.dtype)
        # The softmax ends here, before the other warpgroup is let in.
        state = lax.optimization_barrier(state)
        self._meet()
        return state

    def _products(
        self,
        acc: jax.Array,
        before: jax.Array,
        step: jax.Array,
        softmax: Callable[[jax.Array], tuple[jax.Array, ...]],
    ) -> tuple[jax.Array, ...]:
        """acc with the product of the tile before, and `softmax(q k^T)`, run meanwhile. Once both
        products have started, the other warpgroup takes its turn."""
        keys = self.tile("k", self.slot(step)).transpose((1, 0))
        values = self.tile("v", self.slot(jnp.maximum(step - 1, 0)))

        def start(scores: Any) -> None:
            plgpu.wgmma(scores, self.own("q_smem"), keys)

        def results_of(refs: Sequence[Any]) -> None:
            acc_ref, *result_refs = refs

            def run(scores: Any) -> None:
                start(scores)
                plgpu.wgmma(acc_ref, before, values)
                self._meet()
                results = softmax(plgpu.wgmma_accumulator_load(scores, wait_n=1))
                for ref, result in zip(result_refs, results, strict=True):
                    ref[...] = result

            pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(self.shape))

        def alone(scores: Any) -> jax.Array:
            start(scores)
            self._meet()
            return scores[...]

        if self.static.interpret:
            (acc,) = self.add_products((acc, before, values))
            score = pl.run_scoped(alone, plgpu.WGMMAAccumulatorRef(self.shape))
            return acc, *softmax(score)
        row, tile = self._full(0.0), self.zeros(self.shape[1])
        refs = plgpu.WGMMAAccumulatorRef.init(acc), row, row, row, tile
        return cast(tuple[jax.Array, ...], pl.run_state(results_of)(refs))

    def _write(self, state: _State, last_step: jax.Array, out: Any, lse: Any) -> None:
        """Writes the state as out and lse, through shared memory."""
        peak, total, acc, before = state
        values = self.tile("v", self.slot(last_step))
        (acc,) = self.add_products((acc, before, values))
        out_smem, lse_smem = self.own("out_smem"), self.own("lse_smem")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the student's copy may still read it
        out_smem[...] = (acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [0])).astype(out.dtype)
        lse_smem[...] = peak * _LN2 + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[self.at])
        plgpu.copy_smem_to_gmem(lse_smem, lse.at[self.batch, self.head, self.rows])
