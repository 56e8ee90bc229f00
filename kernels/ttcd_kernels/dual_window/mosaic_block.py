"""The common parts of the Mosaic kernels of dual-window attention: two compute warpgroups and a
memory warpgroup around a ring of tiles in shared memory, products, masks.

The memory warpgroup loads tiles ahead of the compute warpgroups into a ring of `num_stages` slots.
`<name>_ready[slot]` signals the arrival of a tile of that operand, `<name>_free[slot]` its last
read by both compute warpgroups. A compute warpgroup owns half of the block's rows, which are the
rows of its products: queries in the forward and for dq, keys for dk and dv.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ttcd_kernels.dual_window.tiles import Band
from ttcd_kernels.dual_window.tuning import COMPUTE_WARPGROUPS, Tile

# Together at most the 512 that a multiprocessor has for one thread of each warpgroup: enough for 64
# x 128 scores and a 64 x 128 accumulator, and little for copying.
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40


class Static(NamedTuple):
    """The static part of a launch."""

    bands: tuple[Band, ...]  # near first
    halo: int  # keys before the first query
    scale: float
    tile: Tile
    interpret: Any = False


class Tiles(NamedTuple):
    """Tiles of a band (`tiles.visits`); those that are masked are visited first."""

    start: jax.Array
    inner_start: jax.Array
    inner_stop: jax.Array
    stop: jax.Array

    @property
    def num_inner(self) -> jax.Array:
        return self.inner_stop - self.inner_start

    @property
    def num_masked(self) -> jax.Array:
        return self.stop - self.start - self.num_inner

    def masked(self, i: jax.Array) -> jax.Array:
        """The i-th masked tile."""
        return self.start + i + jnp.where(self.start + i >= self.inner_start, self.num_inner, 0)

    def at(self, i: jax.Array) -> jax.Array:
        """The i-th tile visited."""
        inner = self.inner_start + i - self.num_masked
        return jnp.where(i < self.num_masked, self.masked(i), inner)


class Block(abc.ABC):
    """One block, for a tile of queries or keys of one head: its position in the grid, the tiles
    that it visits [B or 1, tiles, bands, 4], its buffers."""

    query_axis: ClassVar[int]  # of a product: 0 where the block's rows are queries, 1: keys
    resident: ClassVar[tuple[str, ...]]  # operands of which a warpgroup keeps its rows
    ring: ClassVar[dict[str, int]]  # operands of the ring, of so many copies for a tile
    lags: ClassVar[dict[str, int]] = {}  # steps that an operand of the ring is needed later

    def __init__(self, static: Static, refs: dict[str, Any], scratch: dict[str, Any]) -> None:
        self.static, self.refs, self.scratch = static, refs, scratch
        self.batch, self.head = lax.axis_index("batch"), lax.axis_index("head")
        self.index = lax.axis_index("tile")
        self.warpgroup = lax.axis_index("warpgroup")
        q, k = refs["q"], refs["k"]
        self.group, self.head_dim, self.dtype = q.shape[2] // k.shape[2], q.shape[3], q.dtype
        rows, columns = self.sizes(static.tile)
        self.shape = rows // COMPUTE_WARPGROUPS, columns  # of a product
        self.first_row = self.index * rows + self.warpgroup * self.shape[0]
        self.rows = pl.ds(self.first_row, self.shape[0])
        self.at = self.batch, self.rows, self.head
        counts = (tiles.stop - tiles.start for tiles in self.bands())
        self.per_sweep = sum(counts, jnp.int32(0))
        self.num_steps = self.per_sweep * self.group if self.query_axis else self.per_sweep

    @classmethod
    def sizes(cls, tile: Tile) -> tuple[int, int]:
        """Rows of the block and of a tile of the ring."""
        return tile[cls.query_axis], tile[1 - cls.query_axis]

    @classmethod
    def launch(
        cls,
        name: str,
        static: Static,
        operands: dict[str, jax.Array],
        results: dict[str, Any],
        **buffers: Any,
    ) -> list[jax.Array]:
        """`results` of one launch with these buffers besides those of the class; a block for every
        tile of q or k, whole ones, and head."""
        x, stages = operands["qk"[cls.query_axis]], static.tile.num_stages
        B, length, heads, H = x.shape
        rows, columns = cls.sizes(static.tile)
        own = COMPUTE_WARPGROUPS, rows // COMPUTE_WARPGROUPS
        free = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages)
        for operand, copies in cls.ring.items():
            ready = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
            buffers |= {f"{operand}_ready": ready, f"{operand}_free": free}
            buffers[f"{operand}_smem"] = matrices(x.dtype, stages, columns, H)
        for operand in filter(operands.__contains__, cls.resident):
            buffers[f"{operand}_smem"] = matrices(x.dtype, *own, H)
            buffers[f"{operand}_ready"] = plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS)
        if static.interpret:
            buffers["staged_smem"] = matrices(x.dtype, *own, columns)

        def body(*refs: Any, **scratch: Any) -> None:
            cls(static, dict(zip([*operands, *results], refs, strict=True)), scratch).run()

        return plgpu.kernel(
            body,
            out_type=list(results.values()),
            scratch_types=buffers,
            # The last axis varies fastest: neighbouring blocks share most of their reads.
            grid=(B, heads, length // rows),
            grid_names=("batch", "head", "tile"),
            num_threads=COMPUTE_WARPGROUPS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name=name,
            interpret=static.interpret,
        )(*operands.values())

    def bands(self) -> list[Tiles]:
        """The tiles of each band, read where they are needed: registers are scarce."""
        row = self.batch if "ids" in self.refs else 0
        bounds, bands = self.refs["tiles"].at[row, self.index], range(len(self.static.bands))
        return [Tiles(*(bounds[band, end] for end in range(4))) for band in bands]

    def run(self) -> None:
        pl.when(self.warpgroup < COMPUTE_WARPGROUPS)(self._compute)
        pl.when(self.warpgroup == COMPUTE_WARPGROUPS)(self._load)

    def _compute(self) -> None:
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        resident = [name for name in self.resident if name in self.refs]
        for name in resident:
            ready = self.own(f"{name}_ready")
            plgpu.copy_gmem_to_smem(self.refs[name].at[self.at], self.own(f"{name}_smem"), ready)
        for name in resident:
            self.wait(f"{name}_ready", self.warpgroup)
        self.compute()
        plgpu.wait_smem_to_gmem(0)

    @abc.abstractmethod
    def compute(self) -> None:
        """The work of a compute warpgroup."""

    @abc.abstractmethod
    def copy(self, name: str, step: jax.Array, buffer: Any, ready: Any) -> None:
        """Starts the copies of an operand of the ring."""

    def visited(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(is in the far band, tile) of the visit `index` of a sweep through the bands."""
        near, *others = self.bands()
        is_far, tile = index >= near.stop - near.start, near.at(index)
        for far in others:
            tile = jnp.where(is_far, far.at(index - (near.stop - near.start)), tile)
        return is_far, tile

    def sweep[State](
        self, band: int, step: jax.Array, state: State, visit: Callable[..., State]
    ) -> tuple[jax.Array, State]:
        """The next step and the state carried through a band's tiles by `visit(state, step, tile)`,
        where the tile of an inner one is None."""
        tiles = self.bands()[band]

        def run(count: jax.Array, tile_of: Callable[[jax.Array], Any]) -> tuple[jax.Array, State]:
            def body(i: jax.Array, state: State) -> State:
                return visit(state, step + i, tile_of(i))

            return step + count, lax.fori_loop(0, count, body, state)

        step, state = run(tiles.num_masked, tiles.masked)
        return run(tiles.num_inner, lambda i: None)

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.static.tile.num_stages))

    def _load(self) -> None:
        """The memory warpgroup."""
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        stages = self.static.tile.num_stages

        def load(name: str, step: jax.Array) -> None:
            slot = self.slot(step)
            pl.when(step >= stages)(lambda: self.wait(f"{name}_free", slot))
            self.copy(name, step, self.tile(name, slot), self.scratch[f"{name}_ready"].at[slot])

        @pl.loop(0, self.num_steps + max(self.lags.values(), default=0))
        def load_all(step: jax.Array) -> None:
            for name in self.ring:
                at = step - self.lags.get(name, 0)
                is_step = (at >= 0) & (at < self.num_steps)
                pl.when(is_step)(functools.partial(load, name, at))

        @pl.loop(jnp.maximum(self.num_steps - stages, 0), self.num_steps)
        def drain(step: jax.Array) -> None:  # so that every arrival is awaited
            for name in self.ring:
                self.wait(f"{name}_free", self.slot(step))

    def wait(self, name: str, index: Any) -> None:
        plgpu.barrier_wait(self.scratch[name].at[index])

    def arrive(self, name: str, index: Any) -> None:
        plgpu.barrier_arrive(self.scratch[name].at[index])

    def tile(self, name: str, slot: jax.Array) -> Any:
        return self.scratch[f"{name}_smem"].at[slot]

    def own(self, name: str) -> Any:
        """This warpgroup's part of a buffer [warpgroups, ...]."""
        return self.scratch[name].at[self.warpgroup]

    def visible(self, tile: jax.Array, band: int) -> jax.Array:
        """Which pairs of this warpgroup's rows and a tile of the ring are visible."""
        first = [self.first_row, tile * self.shape[1]]
        first[self.query_axis] += self.static.halo
        layout = plgpu.Layout.WGMMA
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, self.shape, layout=layout)
        distance = iota(0) - iota(1) + (first[0] - first[1])
        distance = -distance if self.query_axis else distance
        nearest, reach = self.static.bands[band]
        visible = (distance >= nearest) & (distance < reach)
        if "ids" in self.refs:
            ids = self.refs["ids"].at[self.batch]
            of_rows, of_columns = (self.load_vector(ids, first[axis], axis) for axis in (0, 1))
            visible = visible & (self.spread(of_rows, 0) == self.spread(of_columns, 1))
        return visible

    def load_vector(self, source: Any, start: jax.Array, axis: int) -> jax.Array:
        """Elements from `start` on of a vector in device memory, as the rows (axis 0) or columns
        (1) of a product are distributed."""
        part = source.at[pl.ds(start, self.shape[axis])]
        return plgpu.load(part, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)

    def spread(self, x: jax.Array, axis: int) -> jax.Array:
        """A number for each row (axis 0) or column (1), at all elements of a product."""
        return lax.broadcast_in_dim(x, self.shape, [axis])

    def zeros(self, columns: int) -> jax.Array:
        """An accumulator of this warpgroup's rows."""
        acc = jnp.zeros((self.shape[0], columns), jnp.float32)
        return plgpu.layout_cast(acc, plgpu.Layout.WGMMA)

    def add_products(self, *terms: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, ...]:
        """acc + weight operand of each term (acc, weight, operand). JAX's simulator neither carries
        an accumulator nor multiplies from registers: there weights go through a buffer."""
        if not self.static.interpret:

            def products(accs: Sequence[Any]) -> None:
                for acc, (_, weight, operand) in zip(accs, terms, strict=True):
                    plgpu.wgmma(acc, weight, operand)

            accs = tuple(plgpu.WGMMAAccumulatorRef.init(acc) for acc, _, _ in terms)
            return cast(tuple[jax.Array, ...], pl.run_state(products)(accs))
        staged = self.own("staged_smem")

        def added(acc: jax.Array, weight: jax.Array, operand: Any) -> jax.Array:
            staged[...] = weight
            plgpu.commit_smem()

            def product(fresh: Any) -> jax.Array:
                plgpu.wgmma(fresh, staged, operand)
                return acc + fresh[...]

            return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((acc.shape[0], acc.shape[1])))

        return tuple(added(*term) for term in terms)


class QueryBlock(Block):
    """A block for one query tile of one head, with key tiles in the ring."""

    query_axis = 0
    resident = ("q", "d_out0", "d_out1")  # those that there are
    ring: ClassVar[dict[str, int]] = {"k": 1, "v": 1}

    def copy(self, name: str, step: jax.Array, buffer: Any, ready: Any) -> None:
        _, tile = self.visited(step)
        rows = pl.ds(tile * self.shape[1], self.shape[1])
        head = lax.div(self.head, jnp.int32(self.group))
        plgpu.copy_gmem_to_smem(self.refs[name].at[self.batch, rows, head], buffer, ready)


def matrices(dtype: Any, *shape: int) -> Any:
    """A buffer as wgmma reads it: groups of 8 rows of 64 numbers, their 128 bytes swizzled."""
    transforms: Any = plgpu  # to pyright their classes are abstract
    layout = transforms.TilingTransform((8, 64)), transforms.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=layout)
