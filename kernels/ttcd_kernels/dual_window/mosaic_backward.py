"""Dual-window attention's gradients for Hopper, in Pallas Mosaic GPU: a kernel for dq and one for
dk and dv, deterministic, without atomics.

The algorithm is that of `triton_kernels.dual_window_backward_q` and `_kv`, with the lse in base 2.
Where a tile's two products of queries and keys have started, P is computed while the second of them
runs. The two compute warpgroups take no turns: each fills the other's gaps.

Arrays: q, d_out and dq [B, T, N, H], k, v, dk and dv [B, S, K, H], lse and delta [B, N, T] float32,
filled with zeros to whole tiles; `tiles` and `ids` as in the forward, for backward_kv `by_key`.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Shaped

from ttcd_kernels.dual_window.mosaic_block import Block, QueryBlock, Static
from ttcd_kernels.launch import LOG2E
from ttcd_kernels.windows import Keys, Queries

type _Arrays = dict[str, Shaped[Array, "..."]]


def dual_window_backward_q(static: Static, operands: _Arrays) -> Queries:
    """dq from q, k, v, tiles, ids and, for every band i, d_out<i>, lse<i> and delta<i>."""
    q = operands["q"]
    results = {"dq": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    return _QueryGradient.launch("dual_window_backward_q", static, operands, results)[0]


def dual_window_backward_kv(static: Static, operands: _Arrays) -> tuple[Keys, Keys]:
    """dk and dv from the operands of `dual_window_backward_q`."""
    k = operands["k"]
    result = jax.ShapeDtypeStruct(k.shape, k.dtype)
    row = plgpu.SMEM((static.tile.num_stages, static.tile.block_m), jnp.float32)
    buffers = {"lse_smem": row, "delta_smem": row}
    name, results = "dual_window_backward_kv", {"dk": result, "dv": result}
    dk, dv = _KeyGradients.launch(name, static, operands, results, **buffers)
    return dk, dv


class _Gradient(Block):
    """The common part of both."""

    def weights(
        self,
        band: int,
        slot: jax.Array,
        tile: jax.Array | None,
        own: tuple[str, str],
        vector: Callable[[str], jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """(P, dS) of this warpgroup's rows, by two buffers of its own, and a tile, by those of the
        ring; the tile is masked if it is given. `vector` has lse or delta at every element."""
        first, second = self.ring

        def compute(scores: Any, d_weights: Any) -> tuple[jax.Array, jax.Array]:
            self.wait(f"{first}_ready", slot)
            plgpu.wgmma(scores, self.own(own[0]), self.tile(first, slot).transpose((1, 0)))
            self.wait(f"{second}_ready", slot)
            plgpu.wgmma(d_weights, self.own(own[1]), self.tile(second, slot).transpose((1, 0)))
            score = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            weight = jnp.exp2(score * (self.static.scale * LOG2E) - vector("lse"))
            if tile is not None:
                weight = jnp.where(self.visible(tile, band), weight, 0.0)
            d_score = weight * (d_weights[...] - vector("delta"))
            return weight.astype(self.dtype), d_score.astype(self.dtype)

        accumulator = plgpu.WGMMAAccumulatorRef(self.shape)
        return pl.run_scoped(compute, accumulator, accumulator)

    def write(self, **gradients: jax.Array) -> None:
        """Writes the gradients of resident operands, through their buffers."""
        for name, value in gradients.items():
            self.own(f"{name}_smem")[...] = value.astype(self.dtype)
        plgpu.commit_smem()
        for name in gradients:
            plgpu.copy_smem_to_gmem(self.own(f"{name}_smem"), self.refs[f"d{name}"].at[self.at])


class _QueryGradient(_Gradient, QueryBlock):
    """A block of the kernel for dq."""

    def compute(self) -> None:
        dq, step = self.zeros(self.head_dim), jnp.int32(0)
        for band in range(len(self.static.bands)):
            vectors = {}
            for name in ("lse", "delta"):
                source = self.refs[f"{name}{band}"].at[self.batch, self.head]
                vectors[name] = self.load_vector(source, self.first_row, axis=0)
            step, dq = self.sweep(band, step, dq, functools.partial(self._add, band, vectors))
        self.write(q=dq * self.static.scale)

    def _add(
        self, band: int, vectors: _Arrays, dq: jax.Array, step: jax.Array, tile: jax.Array | None
    ) -> jax.Array:
        """dq with one tile's part."""
        slot, own = self.slot(step), ("q_smem", f"d_out{band}_smem")
        _, d_score = self.weights(band, slot, tile, own, lambda x: self.spread(vectors[x], axis=0))
        self.arrive("v_free", slot)
        (dq,) = self.add_products((dq, d_score, self.tile("k", slot)))
        self.arrive("k_free", slot)
        return dq


class _KeyGradients(_Gradient):
    """A block of dk and dv, for one key tile of one kv head: sums over its query heads, both bands
    and their query tiles, which are in the ring. Products are transposed, [keys, queries]."""

    query_axis = 1
    resident = ("k", "v")
    ring: ClassVar[dict[str, int]] = {"q": 2, "d_out": 2}  # with lse, with delta

    def copy(self, name: str, step: jax.Array, buffer: Any, ready: Any) -> None:
        # The query heads one after the other, in each the near band, then the far one.
        head = self.head * self.group + lax.div(step, self.per_sweep)
        is_far, tile = self.visited(lax.rem(step, self.per_sweep))
        rows = pl.ds(tile * self.shape[1], self.shape[1])
        with_it = {"q": "lse", "d_out": "delta"}[name]
        vector = self.tile(with_it, self.slot(step))

        def copy_band(band: int) -> None:
            if name == "d_out":
                source = self.refs[f"d_out{band}"].at[self.batch, rows, head]
                plgpu.copy_gmem_to_smem(source, buffer, ready)
            source = self.refs[f"{with_it}{band}"].at[self.batch, head, rows]
            plgpu.copy_gmem_to_smem(source, vector, ready)

        if name == "q":
            plgpu.copy_gmem_to_smem(self.refs["q"].at[self.batch, rows, head], buffer, ready)
        for band in range(len(self.static.bands)):
            copy = functools.partial(copy_band, band)
            pl.when(is_far if band else ~is_far)(copy) if len(self.static.bands) > 1 else copy()

    def compute(self) -> None:
        nothing = self.zeros(self.head_dim)

        def add_head(member: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            step = member * self.per_sweep
            for band in range(len(self.static.bands)):
                step, sums = self.sweep(band, step, sums, functools.partial(self._add, band))
            return sums

        dk, dv = lax.fori_loop(0, self.group, add_head, (nothing, nothing))
        self.write(k=dk * self.static.scale, v=dv)

    def _add(
        self, band: int, sums: tuple[jax.Array, ...], step: jax.Array, tile: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """dk and dv with one tile's part."""
        slot = self.slot(step)

        def vector(name: str) -> jax.Array:
            layout = plgpu.Layout.WGMMA.reduce(0)
            return self.spread(plgpu.load(self.tile(name, slot), layout=layout), axis=1)

        weight, d_score = self.weights(band, slot, tile, ("k_smem", "v_smem"), vector)
        q, d_out = (self.tile(name, slot) for name in self.ring)
        sums = self.add_products((sums[0], d_score, q), (sums[1], weight, d_out))
        self.arrive("q_free", slot)
        self.arrive("d_out_free", slot)
        return sums
