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
from ttcd_kernels.dual_window.tuning import COMPUTE_WARPGROUPS, MosaicTile

# Together at most the 512 that a multiprocessor has for one thread of each warpgroup: enough for 64
# x 128 scores and a 64 x 128 accumulator, and little for copying.
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40


class Static(NamedTuple):
    """The static part of a launch."""

    bands: tuple[Band, ...]  # near first
    halo: int  # keys before the first query
    scale: float
    tile: MosaicTile
    has_documents: bool
    interpret: Any = False


class Tiles(NamedTuple):
    """Tiles of a band: every pair of the inner ones is visible; the others are masked, and visited
    first."""

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


def layout() -> tuple[Any, ...]:
    """The layout that wgmma reads: groups of 8 rows of 64 numbers, their 128 bytes swizzled."""
    transforms: Any = plgpu  # to pyright their classes are abstract
    return transforms.TilingTransform((8, 64)), transforms.SwizzleTransform(128)


def ring(num_stages: int, **num_copies: int) -> dict[str, Any]:
    """The barriers of a ring with operands of these names, each of so many copies."""
    free = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=num_stages)
    barriers: dict[str, Any] = {}
    for name, count in num_copies.items():
        ready = plgpu.Barrier(num_arrivals=count, num_barriers=num_stages)
        barriers |= {f"{name}_ready": ready, f"{name}_free": free}
    return barriers


def launch_blocks(
    block: Callable[..., "Block"],
    static: Static,
    operands: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    grid: tuple[int, int, int],
    name: str,
) -> list[jax.Array]:
    """`results` of one launch; a block runs `block(static, refs, scratch).run()`."""

    def body(*refs: Any, **scratch_refs: Any) -> None:
        block(static, dict(zip([*operands, *results], refs, strict=True)), scratch_refs).run()

    return plgpu.kernel(
        body,
        out_type=list(results.values()),
        scratch_types=scratch,
        # The last axis varies fastest: neighbouring blocks share most of their reads.
        grid=grid,
        grid_names=("batch", "head", "tile"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        interpret=static.interpret,
    )(*operands.values())


class Block(abc.ABC):
    """One block: its position in the grid, its tiles [B or 1, tiles, bands, 4], its buffers."""

    lags: ClassVar[dict[str, int]] = {}  # steps that an operand of the ring is needed later

    def __init__(self, static: Static, refs: dict[str, Any], scratch: dict[str, Any]) -> None:
        self.static, self.tile = static, static.tile
        self.refs, self.scratch = refs, scratch
        self.batch, self.head = lax.axis_index("batch"), lax.axis_index("head")
        self.index = lax.axis_index("tile")
        self.warpgroup = lax.axis_index("warpgroup")
        counts = (tiles.stop - tiles.start for tiles in self.bands())
        self.per_sweep = sum(counts, jnp.int32(0))
        self.num_steps = self.per_sweep

    def bands(self) -> list[Tiles]:
        """The tiles of each band, read where they are needed: registers are scarce."""
        row = self.batch if self.static.has_documents else 0
        bounds = self.refs["tiles"].at[row, self.index]
        return [
            Tiles(*(bounds[band, end] for end in range(4)))
            for band in range(len(self.static.bands))
        ]

    def run(self) -> None:
        pl.when(self.warpgroup < COMPUTE_WARPGROUPS)(self._compute)
        pl.when(self.warpgroup == COMPUTE_WARPGROUPS)(self._load)

    def _compute(self) -> None:
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        self.compute()

    @abc.abstractmethod
    def compute(self) -> None:
        """The work of a compute warpgroup."""

    @abc.abstractmethod
    def copies(self, step: jax.Array) -> dict[str, Callable[[Any, jax.Array], None]]:
        """For each operand of the ring a function of (ready, slot) that starts its copies."""

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
        return lax.rem(step, jnp.int32(self.tile.num_stages))

    def _load(self) -> None:
        """The memory warpgroup."""
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        names, stages = self.copies(jnp.int32(0)), self.tile.num_stages

        def load(name: str, step: jax.Array) -> None:
            slot = self.slot(step)
            pl.when(step >= stages)(lambda: self.wait(f"{name}_free", slot))
            self.copies(step)[name](self.scratch[f"{name}_ready"].at[slot], slot)

        def load_all(step: jax.Array) -> None:
            for name in names:
                at = step - self.lags.get(name, 0)
                is_step = (at >= 0) & (at < self.num_steps)
                pl.when(is_step)(functools.partial(load, name, at))

        def drain(step: jax.Array) -> None:
            for name in names:
                self.wait(f"{name}_free", self.slot(step))

        loop(0, self.num_steps + max(self.lags.values(), default=0), load_all)
        # So that every arrival is awaited.
        loop(jnp.maximum(self.num_steps - stages, 0), self.num_steps, drain)

    def wait(self, name: str, index: Any) -> None:
        plgpu.barrier_wait(self.scratch[name].at[index])

    def arrive(self, name: str, index: Any) -> None:
        plgpu.barrier_arrive(self.scratch[name].at[index])

    @property
    def staged(self) -> Any:
        """The buffer that `add_products` needs in JAX's simulator."""
        return self.own("staged_smem") if self.static.interpret else None

    def own(self, name: str) -> Any:
        """This warpgroup's part of a buffer [warpgroups, ...]."""
        return self.scratch[name].at[self.warpgroup]

    def fetch(self, name: str, source: Any) -> None:
        """Starts a copy into this warpgroup's part of `<name>_smem`."""
        plgpu.copy_gmem_to_smem(source, self.own(f"{name}_smem"), self.own(f"{name}_ready"))

    def visible(
        self,
        shape: tuple[int, int],
        first: tuple[jax.Array, jax.Array],
        band: Band,
        query_axis: int,
    ) -> jax.Array:
        """Which pairs of a tile of this shape are visible. Its rows and columns are the positions
        from `first` on; those along `query_axis` are the queries."""
        wgmma = plgpu.Layout.WGMMA
        rows, columns = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=wgmma) for axis in (0, 1)
        )
        distance = rows - columns + (first[0] - first[1])
        distance = -distance if query_axis else distance
        visible = (distance >= band[0]) & (distance < band[1])
        if self.static.has_documents:
            ids = self.refs["ids"].at[self.batch]
            of_rows, of_columns = (load_vector(ids, first[axis], shape, axis) for axis in (0, 1))
            visible = visible & (by_row(of_rows, shape) == by_column(of_columns, shape))
        return visible


class QueryBlock(Block):
    """A block for one query tile of one head, with key tiles in the ring."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.q, self.k = self.refs["q"], self.refs["k"]
        self.kv_head = lax.div(self.head, jnp.int32(self.q.shape[2] // self.k.shape[2]))
        self.num_rows = self.tile.block_q // COMPUTE_WARPGROUPS
        self.first_row = self.index * self.tile.block_q + self.warpgroup * self.num_rows
        self.rows = pl.ds(self.first_row, self.num_rows)
        self.shape = self.num_rows, self.tile.block_kv

    def copies(self, step: jax.Array) -> dict[str, Callable[[Any, jax.Array], None]]:
        _, index = self.visited(step)
        rows = pl.ds(index * self.tile.block_kv, self.tile.block_kv)

        def copy(name: str) -> Callable[[Any, jax.Array], None]:
            source = self.refs[name].at[self.batch, rows, self.kv_head]
            buffer = self.scratch[f"{name}_smem"]
            return lambda ready, slot: plgpu.copy_gmem_to_smem(source, buffer.at[slot], ready)

        return {"k": copy("k"), "v": copy("v")}

    def sees(self, tile: jax.Array, band: int) -> jax.Array:
        """[queries of this warpgroup, keys of the tile]."""
        first = self.first_row + self.static.halo, tile * self.tile.block_kv
        return self.visible(self.shape, first, self.static.bands[band], query_axis=0)


def load_vector(source: Any, start: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """Elements from `start` on of a vector in device memory, as the rows (axis 0) or columns (1) of
    a product of this shape are distributed."""
    part = source.at[pl.ds(start, shape[axis])]
    return plgpu.load(part, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


def zeros(rows: int, columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def add_products(
    terms: Sequence[tuple[jax.Array, jax.Array, Any]], staged: Any
) -> tuple[jax.Array, ...]:
    """acc + weight operand of each term (acc, weight, operand). JAX's simulator neither carries an
    accumulator nor multiplies from registers: there `staged` is a buffer for weights, else None."""
    if staged is None:

        def products(accs: Sequence[Any]) -> None:
            for acc, (_, weight, operand) in zip(accs, terms, strict=True):
                plgpu.wgmma(acc, weight, operand)

        accs = tuple(plgpu.WGMMAAccumulatorRef.init(acc) for acc, _, _ in terms)
        return cast(tuple[jax.Array, ...], pl.run_state(products)(accs))

    def added(acc: jax.Array, weight: jax.Array, operand: Any) -> jax.Array:
        staged[...] = weight
        plgpu.commit_smem()

        def product(fresh: Any) -> jax.Array:
            plgpu.wgmma(fresh, staged, operand)
            return acc + fresh[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((acc.shape[0], acc.shape[1])))

    return tuple(added(*term) for term in terms)


def loop(start: Any, stop: jax.Array, body: Callable[[jax.Array], None]) -> None:
    lax.fori_loop(start, stop, lambda i, _: body(i), None)


def by_row(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return lax.broadcast_in_dim(x, tuple(shape), [0])


def by_column(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return lax.broadcast_in_dim(x, tuple(shape), [1])
