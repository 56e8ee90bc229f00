"""Dual-window attention's gradients for Hopper, in Pallas Mosaic GPU: a kernel for dq and one for
dk and dv, deterministic, without atomics.

The algorithm is that of `triton_kernels.dual_window_backward_q` and `_kv`: in each band

    P = 2^(q k^T scale log2(e) - lse),  dS = P * (dO v^T - D),  dq = dS k scale,  dk = dS^T q scale,
    dv = P^T dO

with the lse (in base 2), dO and D of the band. Where a tile's two products of queries and keys have
started, P is computed while the second of them runs. The two compute warpgroups take no turns: each
fills the other's gaps.

*backward_q*: a block computes dq of one query tile of one head; key tiles are in the ring.

*backward_kv*: a block computes dk and dv of one key tile of one kv head, summed over its query
heads, both bands and their query tiles, which are in the ring. Products are transposed, [keys,
queries].

Arrays: q, d_out and dq [B, T, N, H], k, v, dk and dv [B, S, K, H], lse and delta [B, N, T] float32,
filled with zeros to whole tiles; `tiles` and `ids` as in the forward, for backward_kv of
`tiles.query_tiles`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Shaped

from ttcd_kernels.dual_window import mosaic_block
from ttcd_kernels.dual_window.mosaic_block import Block, QueryBlock, Static, by_column, by_row
from ttcd_kernels.dual_window.tuning import COMPUTE_WARPGROUPS
from ttcd_kernels.launch import LOG2E
from ttcd_kernels.windows import Keys, Queries

type _Arrays = dict[str, Shaped[Array, "..."]]


def dual_window_backward_q(static: Static, operands: _Arrays) -> Queries:
    """dq from q, k, v, tiles, ids and, for every band i, d_out<i>, lse<i> and delta<i>."""
    q = operands["q"]
    B, T, N, H = q.shape
    tile, dtype, layout = static.tile, q.dtype, mosaic_block.layout()
    rows = COMPUTE_WARPGROUPS, tile.block_q // COMPUTE_WARPGROUPS
    ring = tile.num_stages, tile.block_kv, H
    scratch: dict[str, Any] = mosaic_block.ring(tile.num_stages, k=1, v=1) | {
        "k_smem": plgpu.SMEM(ring, dtype, transforms=layout),
        "v_smem": plgpu.SMEM(ring, dtype, transforms=layout),
    }
    for name in ("q", *(f"d_out{band}" for band in range(len(static.bands)))):
        scratch[f"{name}_smem"] = plgpu.SMEM((*rows, H), dtype, transforms=layout)
        scratch[f"{name}_ready"] = plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS)
    if static.interpret:
        scratch["staged_smem"] = plgpu.SMEM((*rows, tile.block_kv), dtype, transforms=layout)
    results = {"dq": jax.ShapeDtypeStruct(q.shape, dtype)}
    grid, name = (B, N, T // tile.block_q), "dual_window_backward_q"
    return mosaic_block.launch_blocks(
        _QueryGradient, static, operands, results, scratch, grid, name
    )[0]


class _QueryGradient(QueryBlock):
    """A block of the kernel for dq."""

    def compute(self) -> None:
        rows = self.batch, self.rows, self.head
        resident = "q", *(f"d_out{band}" for band in range(len(self.static.bands)))
        for name in resident:
            self.fetch(name, self.refs[name].at[rows])
        for name in resident:
            self.wait(f"{name}_ready", self.warpgroup)
        dq, step = mosaic_block.zeros(self.num_rows, self.q.shape[-1]), jnp.int32(0)
        for band in range(len(self.static.bands)):
            lse, delta = (
                mosaic_block.load_vector(
                    self.refs[f"{name}{band}"].at[self.batch, self.head],
                    self.first_row,
                    self.shape,
                    axis=0,
                )
                for name in ("lse", "delta")
            )
            step, dq = self.sweep(band, step, dq, functools.partial(self._add, band, lse, delta))
        self.own("q_smem")[...] = (dq * self.static.scale).astype(self.q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.own("q_smem"), self.refs["dq"].at[rows])
        plgpu.wait_smem_to_gmem(0)

    def _add(
        self,
        band: int,
        lse: jax.Array,
        delta: jax.Array,
        dq: jax.Array,
        step: jax.Array,
        tile: jax.Array | None,
    ) -> jax.Array:
        """dq with one tile's part; the tile is masked if it is given."""
        slot = self.slot(step)
        k, v = (self.scratch[f"{name}_smem"].at[slot] for name in "kv")
        self.wait("k_ready", slot)

        def gradient(scores: Any, d_weights: Any) -> jax.Array:
            plgpu.wgmma(scores, self.own("q_smem"), k.transpose((1, 0)))
            self.wait("v_ready", slot)
            plgpu.wgmma(d_weights, self.own(f"d_out{band}_smem"), v.transpose((1, 0)))
            score = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            weight = jnp.exp2(score * (self.static.scale * LOG2E) - by_row(lse, self.shape))
            if tile is not None:
                weight = jnp.where(self.sees(tile, band), weight, 0.0)
            return weight * (d_weights[...] - by_row(delta, self.shape))

        accumulator = plgpu.WGMMAAccumulatorRef(self.shape)
        d_score = pl.run_scoped(gradient, accumulator, accumulator)
        self.arrive("v_free", slot)
        (dq,) = mosaic_block.add_products([(dq, d_score.astype(self.q.dtype), k)], self.staged)
        self.arrive("k_free", slot)
        return dq


def dual_window_backward_kv(static: Static, operands: _Arrays) -> tuple[Keys, Keys]:
    """dk and dv from the operands of `dual_window_backward_q`."""
    k = operands["k"]
    B, S, K, H = k.shape
    tile, dtype, layout = static.tile, k.dtype, mosaic_block.layout()
    rows = COMPUTE_WARPGROUPS, tile.block_kv // COMPUTE_WARPGROUPS
    ring = tile.num_stages, tile.block_q
    scratch: dict[str, Any] = mosaic_block.ring(tile.num_stages, q=2, d_out=2) | {
        "q_smem": plgpu.SMEM((*ring, H), dtype, transforms=layout),
        "d_out_smem": plgpu.SMEM((*ring, H), dtype, transforms=layout),
        "lse_smem": plgpu.SMEM(ring, jnp.float32),
        "delta_smem": plgpu.SMEM(ring, jnp.float32),
    }
    for name in "kv":
        scratch[f"{name}_smem"] = plgpu.SMEM((*rows, H), dtype, transforms=layout)
        scratch[f"{name}_ready"] = plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS)
    if static.interpret:
        scratch["staged_smem"] = plgpu.SMEM((*rows, tile.block_q), dtype, transforms=layout)
    result = jax.ShapeDtypeStruct(k.shape, dtype)
    results = {"dk": result, "dv": result}
    grid, name = (B, K, S // tile.block_kv), "dual_window_backward_kv"
    dk, dv = mosaic_block.launch_blocks(
        _KeyGradients, static, operands, results, scratch, grid, name
    )
    return dk, dv


class _KeyGradients(Block):
    """A block of the kernel for dk and dv."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.k = self.refs["k"]
        self.group = self.refs["q"].shape[2] // self.k.shape[2]
        self.num_steps = self.per_sweep * self.group
        self.num_rows = self.tile.block_kv // COMPUTE_WARPGROUPS
        self.first_key = self.index * self.tile.block_kv + self.warpgroup * self.num_rows
        self.shape = self.num_rows, self.tile.block_q

    def copies(self, step: jax.Array) -> dict[str, Callable[[Any, jax.Array], None]]:
        # The query heads one after the other, in each the near band, then the far one.
        head = self.head * self.group + lax.div(step, self.per_sweep)
        is_far, index = self.visited(lax.rem(step, self.per_sweep))
        rows = pl.ds(index * self.tile.block_q, self.tile.block_q)

        def copy(name: str, source: Any, ready: Any, slot: jax.Array) -> None:
            part = source.at[self.batch, rows, head]
            if name in ("lse", "delta"):
                part = source.at[self.batch, head, rows]
            plgpu.copy_gmem_to_smem(part, self.scratch[f"{name}_smem"].at[slot], ready)

        def copy_of_band(name: str, ready: Any, slot: jax.Array) -> None:
            for band in range(len(self.static.bands)):
                run = functools.partial(copy, name, self.refs[f"{name}{band}"], ready, slot)
                pl.when(is_far if band else ~is_far)(run) if len(self.static.bands) > 1 else run()

        def copy_queries(ready: Any, slot: jax.Array) -> None:
            copy("q", self.refs["q"], ready, slot)
            copy_of_band("lse", ready, slot)

        def copy_cotangents(ready: Any, slot: jax.Array) -> None:
            copy_of_band("d_out", ready, slot)
            copy_of_band("delta", ready, slot)

        return {"q": copy_queries, "d_out": copy_cotangents}

    def compute(self) -> None:
        rows = self.batch, pl.ds(self.first_key, self.num_rows), self.head
        for name in "kv":
            self.fetch(name, self.refs[name].at[rows])
        for name in "kv":
            self.wait(f"{name}_ready", self.warpgroup)
        nothing = mosaic_block.zeros(self.num_rows, self.k.shape[-1])

        def add_head(member: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            step = member * self.per_sweep
            for band in range(len(self.static.bands)):
                step, sums = self.sweep(band, step, sums, functools.partial(self._add, band))
            return sums

        dk, dv = lax.fori_loop(0, self.group, add_head, (nothing, nothing))
        self.own("k_smem")[...] = (dk * self.static.scale).astype(self.k.dtype)
        self.own("v_smem")[...] = dv.astype(self.k.dtype)
        plgpu.commit_smem()
        for name in "kv":
            plgpu.copy_smem_to_gmem(self.own(f"{name}_smem"), self.refs[f"d{name}"].at[rows])
        plgpu.wait_smem_to_gmem(0)

    def _add(
        self,
        band: int,
        sums: tuple[jax.Array, ...],
        step: jax.Array,
        tile: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        """dk and dv with one tile's part; the tile is masked if it is given."""
        slot = self.slot(step)
        q, d_out = (self.scratch[f"{name}_smem"].at[slot] for name in ("q", "d_out"))
        self.wait("q_ready", slot)

        def column(name: str) -> jax.Array:
            vector = self.scratch[f"{name}_smem"].at[slot]
            vector = plgpu.load(vector, layout=plgpu.Layout.WGMMA.reduce(0))
            return by_column(vector, self.shape)

        def gradient(scores: Any, d_weights: Any) -> tuple[jax.Array, jax.Array]:
            plgpu.wgmma(scores, self.own("k_smem"), q.transpose((1, 0)))
            self.wait("d_out_ready", slot)
            plgpu.wgmma(d_weights, self.own("v_smem"), d_out.transpose((1, 0)))
            score = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            weight = jnp.exp2(score * (self.static.scale * LOG2E) - column("lse"))
            if tile is not None:
                first = self.first_key, tile * self.tile.block_q + self.static.halo
                visible = self.visible(self.shape, first, self.static.bands[band], query_axis=1)
                weight = jnp.where(visible, weight, 0.0)
            d_score = weight * (d_weights[...] - column("delta"))
            return weight.astype(self.k.dtype), d_score.astype(self.k.dtype)

        accumulator = plgpu.WGMMAAccumulatorRef(self.shape)
        weight, d_score = pl.run_scoped(gradient, accumulator, accumulator)
        dk, dv = sums
        sums = mosaic_block.add_products([(dk, d_score, q), (dv, weight, d_out)], self.staged)
        self.arrive("q_free", slot)
        self.arrive("d_out_free", slot)
        return sums
