"""Dual-window attention's forward for Hopper, in Pallas Mosaic GPU: wgmma products, TMA copies and
specialised warpgroups.

The algorithm is that of `triton_kernels.dual_window_forward`: key tiles from the diagonal outward
update one softmax state, which after the near band (distance < w_S) is the student's result and
after the far band (w_S <= distance < w_T) the teacher's. Tiles that the student's edge cuts are
visited twice, once for each band. A block of three warpgroups computes one query tile of one head:

*two compute warpgroups* own half of its queries each and take turns: while one multiplies, the
other is in its softmax. They meet twice per tile,

    scores of a tile started - meet - softmax - meet - its values multiplied - next tile

the second of them half a tile late.

*one memory warpgroup* loads key and value tiles ahead of them into a ring of `num_stages` slots.
`k_ready[slot]` and `v_ready[slot]` say that a tile has arrived, `k_free[slot]` and `v_free[slot]`
that both compute warpgroups have read it.

Arrays: q and outputs [B, T, N, H], k and v [B, S, K, H], lse [B, N, T] float32; T is a multiple of
`block_q`, S of `block_kv`. Query row t has position t + `first_position`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ttcd_kernels.dual_window.tuning import COMPUTE_WARPGROUPS, MosaicTile

KERNEL_NAME = "dual_window_forward"  # Mosaic adds _mosaic_gpu
# Together at most the 512 that a multiprocessor has for one thread of each warpgroup: enough for 64
# x 128 scores and a 64 x 128 accumulator, and little for copying.
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40
_LN2 = 0.6931471805599453

# peak [rows] in base 2 and after scaling, total [rows], acc [rows, H]; float32.
type _State = tuple[jax.Array, jax.Array, jax.Array]


class Facts(NamedTuple):
    """Static facts of a launch."""

    bands: tuple[tuple[int, int], ...]  # (min, max) distance, near first; max excluded
    num_keys: int  # without padding
    first_position: int
    scale_log2: float  # > 0
    tile: MosaicTile
    interpret: Any = False


class _Tiles(NamedTuple):
    """Key tiles of a band: every pair of the inner ones is in it; the others are masked.
    The sweep takes them from `stop - 1` down to `start`."""

    start: jax.Array
    inner_start: jax.Array
    inner_stop: jax.Array
    stop: jax.Array

    @property
    def count(self) -> jax.Array:
        return self.stop - self.start


def dual_window_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, facts: Facts
) -> list[tuple[jax.Array, jax.Array]]:
    """(out, lse) after each band, nearest first."""
    B, T, N, H = q.shape
    tile, dtype = facts.tile, q.dtype
    assert T % tile.block_q == 0
    assert k.shape[1] % tile.block_kv == 0
    # The layout that wgmma reads: groups of 8 rows of 64 numbers, their 128 bytes swizzled.
    transforms: Any = plgpu  # to pyright their classes are abstract
    layout = transforms.TilingTransform((8, 64)), transforms.SwizzleTransform(128)
    rows = (COMPUTE_WARPGROUPS, tile.rows)
    ring = (tile.num_stages, tile.block_kv, H)
    ready = plgpu.Barrier(num_barriers=tile.num_stages)
    free = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=tile.num_stages)
    scratch: dict[str, Any] = {
        "q_smem": plgpu.SMEM((*rows, H), dtype, transforms=layout),
        "k_smem": plgpu.SMEM(ring, dtype, transforms=layout),
        "v_smem": plgpu.SMEM(ring, dtype, transforms=layout),
        "out_smem": plgpu.SMEM((*rows, H), dtype, transforms=layout),
        "lse_smem": plgpu.SMEM(rows, jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
        "k_ready": ready,
        "v_ready": ready,
        "k_free": free,
        "v_free": free,
        "turn": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
    }
    if facts.interpret:
        scratch["weight_smem"] = plgpu.SMEM((*rows, tile.block_kv), dtype, transforms=layout)
    out_type = [jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)]

    def body(*refs: Any, **scratch_refs: Any) -> None:
        _Block(facts, N // k.shape[2], refs, scratch_refs).run()

    results = plgpu.kernel(
        body,
        out_type=out_type * len(facts.bands),
        scratch_types=scratch,
        # The last axis varies fastest: neighbouring blocks share most of their keys in the cache.
        grid=(B, N, T // tile.block_q),
        grid_names=("batch", "head", "query_tile"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=KERNEL_NAME,
        interpret=facts.interpret,
    )(q, k, v)
    return list(zip(results[::2], results[1::2], strict=True))


class _Block:
    """One block: its position in the grid, its key tiles, its buffers."""

    def __init__(
        self, facts: Facts, group: int, refs: Sequence[Any], scratch: dict[str, Any]
    ) -> None:
        self.facts, self.tile = facts, facts.tile
        self.q, self.k, self.v, *results = refs
        self.results = list(zip(results[::2], results[1::2], strict=True))
        self.scratch = scratch
        self.batch, self.head = lax.axis_index("batch"), lax.axis_index("head")
        self.kv_head = lax.div(self.head, jnp.int32(group))
        self.warpgroup = lax.axis_index("warpgroup")
        self.first_row = lax.axis_index("query_tile") * self.tile.block_q
        self.bands = [self._tiles(*band) for band in facts.bands]
        self.num_steps = sum((tiles.count for tiles in self.bands), jnp.int32(0))

    def run(self) -> None:
        pl.when(self.warpgroup < COMPUTE_WARPGROUPS)(self._compute)
        pl.when(self.warpgroup == COMPUTE_WARPGROUPS)(self._load)

    def _tiles(self, min_distance: int, max_distance: int) -> _Tiles:
        block = self.tile.block_kv
        first = self.first_row + self.facts.first_position
        last = first + self.tile.block_q - 1

        def floor(key: jax.Array) -> jax.Array:
            return lax.div(jnp.maximum(key, 0), jnp.int32(block))

        stop = floor(jnp.minimum(last - min_distance, self.facts.num_keys - 1) + block)
        start = jnp.minimum(floor(first - max_distance + 1), stop)
        inner_stop = jnp.clip(floor(first - min_distance + 1), start, stop)
        inner_start = jnp.clip(floor(last - max_distance + block), start, inner_stop)
        return _Tiles(start, inner_start, inner_stop, stop)

    def _slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.tile.num_stages))

    # The memory warpgroup.

    def _load(self) -> None:
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        at, stages = self.scratch, self.tile.num_stages

        def load(step: jax.Array, is_first_round: bool) -> None:
            slot, index, before = self._slot(step), jnp.int32(0), jnp.int32(0)
            for tiles in self.bands:  # the last band that has begun
                tile = tiles.stop - 1 - (step - before)
                index = jnp.where(step >= before, tile, index)
                before += tiles.count
            rows = pl.ds(index * self.tile.block_kv, self.tile.block_kv)
            for name, source in (("k", self.k), ("v", self.v)):
                if not is_first_round:
                    plgpu.barrier_wait(at[f"{name}_free"].at[slot])
                plgpu.copy_gmem_to_smem(
                    source.at[self.batch, rows, self.kv_head],
                    at[f"{name}_smem"].at[slot],
                    at[f"{name}_ready"].at[slot],
                )

        filled = jnp.minimum(self.num_steps, stages)
        _loop(0, filled, lambda step: load(step, is_first_round=True))
        _loop(filled, self.num_steps, lambda step: load(step, is_first_round=False))

        def drain(step: jax.Array) -> None:
            plgpu.barrier_wait(at["k_free"].at[self._slot(step)])
            plgpu.barrier_wait(at["v_free"].at[self._slot(step)])

        _loop(self.num_steps - filled, self.num_steps, drain)  # so that every arrival is awaited

    # The compute warpgroups.

    def _compute(self) -> None:
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        at, rows, H = self.scratch, self.tile.rows, self.q.shape[-1]
        q_ready = at["q_ready"].at[self.warpgroup]
        plgpu.copy_gmem_to_smem(
            self.q.at[self.batch, self._rows(), self.head], at["q_smem"].at[self.warpgroup], q_ready
        )
        plgpu.barrier_wait(q_ready)
        by_row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((rows, H), jnp.float32), plgpu.Layout.WGMMA),
        )
        plgpu.barrier_wait(at["k_ready"].at[0])
        pl.when(self.warpgroup == 1)(self._meet)
        step = jnp.int32(0)
        for band, tiles, refs in zip(self.facts.bands, self.bands, self.results, strict=True):
            edges = tiles.stop, tiles.inner_stop, tiles.inner_start, tiles.start
            for part in range(3):  # the near edge, the inner tiles, the far edge
                state = self._attend(state, step, edges[part], edges[part + 1], band, part != 1)
                step += edges[part] - edges[part + 1]
            self._write(state, *refs)
        pl.when(self.warpgroup == 0)(self._meet)
        plgpu.wait_smem_to_gmem(0)

    def _rows(self) -> Any:
        return pl.ds(self.first_row + self.warpgroup * self.tile.rows, self.tile.rows)

    def _meet(self) -> None:
        plgpu.barrier_arrive(self.scratch["turn"])
        plgpu.barrier_wait(self.scratch["turn"])

    def _attend(
        self,
        state: _State,
        first_step: jax.Array,
        stop: jax.Array,
        start: jax.Array,
        band: tuple[int, int],
        is_edge: bool,
    ) -> _State:
        """The state carried through the key tiles stop - 1 .. start."""
        rows, block, at = self.tile.rows, self.tile.block_kv, self.scratch
        scale = self.facts.scale_log2
        position = self.first_row + self.warpgroup * rows + self.facts.first_position

        def attend(i: jax.Array, state: _State) -> _State:
            peak, total, acc = state
            step = first_step + i
            slot = self._slot(step)
            score = self._scores(slot)
            plgpu.barrier_arrive(at["k_free"].at[slot])
            if is_edge:
                distance = _distances(rows, block) + (position - (stop - 1 - i) * block)
                visible = (distance >= band[0]) & (distance < band[1])
                score = jnp.where(visible, score, -jnp.inf)
            # Scaled inside the exponential, where it is one fused multiply and add.
            new_peak = jnp.maximum(peak, score.max(axis=1) * scale)
            shift = new_peak
            if is_edge:
                # A row that has seen no key yet has weights of 0, not 2^(inf - inf).
                shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            shrink = jnp.exp2(peak - shift)
            weight = jnp.exp2(score * scale - _by_row(shift, score.shape))
            total = total * shrink + weight.sum(axis=1)
            acc = acc * _by_row(shrink, acc.shape)
            narrow = weight.astype(self.q.dtype)
            # The softmax ends here, before the other warpgroup is let in.
            acc, total, new_peak, narrow = lax.optimization_barrier((acc, total, new_peak, narrow))
            plgpu.barrier_arrive(at["turn"])
            plgpu.barrier_wait(at["v_ready"].at[slot])
            plgpu.barrier_wait(at["turn"])

            def await_next_keys() -> None:
                @pl.when(step + 1 < self.num_steps)
                def _() -> None:
                    plgpu.barrier_wait(at["k_ready"].at[self._slot(step + 1)])

            acc = self._add_values(acc, narrow, slot, await_next_keys)
            plgpu.barrier_arrive(at["v_free"].at[slot])
            return new_peak, total, acc

        return lax.fori_loop(0, stop - start, attend, state)

    def _scores(self, slot: jax.Array) -> jax.Array:
        """q k^T of one tile [rows, block_kv], unscaled; once the product has started, the other
        warpgroup takes its turn."""

        def product(acc: Any) -> jax.Array:
            q, k = self.scratch["q_smem"].at[self.warpgroup], self.scratch["k_smem"].at[slot]
            plgpu.wgmma(acc, q, k.transpose((1, 0)))
            self._meet()
            return acc[...]

        return pl.run_scoped(
            product, plgpu.WGMMAAccumulatorRef((self.tile.rows, self.tile.block_kv))
        )

    def _add_values(
        self, acc: jax.Array, weight: jax.Array, slot: jax.Array, meanwhile: Callable[[], None]
    ) -> jax.Array:
        """acc + weight v, running `meanwhile` during the product."""
        v = self.scratch["v_smem"].at[slot]
        if not self.facts.interpret:

            def product(acc: Any) -> None:
                plgpu.wgmma(acc, weight, v)
                meanwhile()

            return cast(jax.Array, pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc)))

        # The interpreter neither carries an accumulator nor multiplies from registers.
        staged = self.scratch["weight_smem"].at[self.warpgroup]
        staged[...] = weight
        plgpu.commit_smem()

        def added(fresh: Any) -> jax.Array:
            plgpu.wgmma(fresh, staged, v)
            return acc + fresh[...]

        acc = pl.run_scoped(added, plgpu.WGMMAAccumulatorRef((self.tile.rows, self.q.shape[-1])))
        meanwhile()
        return acc

    def _write(self, state: _State, out: Any, lse: Any) -> None:
        """Writes the state as out and lse, through shared memory."""
        peak, total, acc = state
        out_smem = self.scratch["out_smem"].at[self.warpgroup]
        lse_smem = self.scratch["lse_smem"].at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the student's copy may still read it
        out_smem[...] = (acc * _by_row(1.0 / total, acc.shape)).astype(out.dtype)
        lse_smem[...] = peak * _LN2 + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[self.batch, self._rows(), self.head])
        plgpu.copy_smem_to_gmem(lse_smem, lse.at[self.batch, self.head, self._rows()])


def _loop(start: Any, stop: jax.Array, body: Callable[[jax.Array], None]) -> None:
    lax.fori_loop(start, stop, lambda i, _: body(i), None)


def _by_row(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _distances(rows: int, keys: int) -> jax.Array:
    """Row minus column [rows, keys]."""

    def index(axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (rows, keys), axis, layout=plgpu.Layout.WGMMA)

    return index(0) - index(1)
