"""Cases of decode attention: shapes, definition, implementations, JAX's attention by window."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from ttcd_kernels import decode_attention_with_lse, launch
from ttcd_kernels.decode import triton_call, tuning
from ttcd_kernels.decode.xla import visible_slots
from ttcd_kernels.windows import Windows

from experiments.studies.kernels import definition
from experiments.studies.kernels.programs import Program, Work

INPUTS = 3  # q and both caches


class Case(NamedTuple):
    """One call: row b is at `first_position` + `step` b. Windows count the query itself."""

    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    teacher_window: int
    student_window: int
    num_slots: int | None = None  # None: as many as the teacher's window
    first_position: int = 100_000  # far beyond any window
    step: int = 7
    scale: float | None = None
    dtype: str = "bfloat16"
    rounds: int = 5
    num_compared: None = None  # all

    @property
    def positions(self) -> Int[Array, " B"]:
        return jnp.asarray(self.first_position + self.step * np.arange(self.batch, dtype=np.int32))

    @property
    def windows(self) -> Windows:
        return Windows(self.teacher_window, self.student_window, self.scale or self.head_dim**-0.5)


_CHECK = (
    Case("300/100 H16/8 D128, 517 slots", 3, 16, 8, 128, 300, 100, num_slots=517),
    Case("1000/999 H17 of one kv head D64", 2, 17, 1, 64, 1000, 999),
    Case("256/256 H6/2 D32", 4, 6, 2, 32, 256, 256),
    # A row that waits, the first position, ...
    Case("300/1 H24 D64, beginning", 9, 24, 24, 64, 300, 1, first_position=-7),
    Case("300/100 H6/2 D80", 3, 6, 2, 80, 300, 100),
    Case("256/256 H8 D96, 400 slots", 2, 8, 8, 96, 256, 256, num_slots=400),
)
SHAPES: dict[str, tuple[Case, ...]] = {
    "tiny": (Case("B3 16/8", 3, 4, 2, 8, 16, 8, num_slots=20, dtype="float32", rounds=3),),
    "cpu": (
        Case("B1 2048/1024 H24 D64", 1, 24, 24, 64, 2048, 1024, dtype="float32"),
        Case("B8 2048/1024 H16/8 D64", 8, 16, 8, 64, 2048, 1024, dtype="float32"),
    ),
    "paper": (Case("B8 8192/4096 H16/8 D128", 8, 16, 8, 128, 8192, 4096),),
    "more": (
        *(Case(f"B{n} 8192/4096 H16/8 D128", n, 16, 8, 128, 8192, 4096) for n in (1, 64)),
        *(Case(f"B{n} 2048/1024 H24 D64", n, 24, 24, 64, 2048, 1024) for n in (1, 8, 64)),
    ),
    "check": (
        *(case._replace(dtype=dtype) for case in _CHECK for dtype in launch.DTYPES),
        # Slices merged in several steps, scores in reverse order whose exponentials overflow.
        Case("5000/4999 H6 of one kv head D64, scale -4", 2, 6, 1, 64, 5000, 4999, scale=-4.0),
        # So many rows that a slice is a whole band, of several tiles.
        Case("700/400 H2/1 D64, 300 rows", 300, 2, 1, 64, 700, 400),
    ),
}


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """q and both caches. Positions are constants of the programs."""
    q = jax.ShapeDtypeStruct((case.batch, case.num_heads, case.head_dim), case.dtype)
    slots = case.num_slots or case.teacher_window
    cache = jax.ShapeDtypeStruct((case.batch, slots, case.num_kv_heads, case.head_dim), case.dtype)
    return [q, cache, cache]


def expected(case: Case, operands: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """All four results by name."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in operands)
    results = definition.decode(q, k, v, np.asarray(case.positions), case.windows)
    return dict(zip(definition.NAMES, results, strict=False))


def implementations(case: Case) -> dict[str, Callable[..., Any]]:
    """(q, k_cache, v_cache) -> (teacher, student, teacher lse, student lse); of JAX outputs."""
    teacher, student = windows = case.teacher_window, case.student_window
    options: Any = {"teacher_window": teacher, "student_window": student, "scale": case.scale}
    dual = functools.partial(decode_attention_with_lse, position=case.positions, **options)

    def twice(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> tuple[jax.Array, ...]:
        """JAX's attention, one masked call per window."""
        visible = (visible_slots(case.positions, k_cache.shape[1], w) for w in windows)
        attend: Any = functools.partial(jax.nn.dot_product_attention, implementation="xla")
        return tuple(
            attend(q[:, None], k_cache, v_cache, mask=x[:, None, None])[:, 0] for x in visible
        )

    has_triton = triton_call.unsupported(*operand_shapes(case)) is None
    names = ("xla", "triton")[: 1 + has_triton]
    functions = {name: functools.partial(dual, implementation=name) for name in names}
    return functions | ({} if case.scale else {"jax.nn twice": twice})


def alone(case: Case, kernel: str, tile: tuning.Tile) -> Program:
    """The first kernel with a tile as a function, and its operands."""
    run = functools.partial(triton_call.launch_shares, case.windows, tile)
    return lambda q, k, v: run(q, k, v, case.positions), operand_shapes(case)


def work(case: Case, direction: str) -> Work:
    """Both products of each head over the teacher's window; its keys and values, q and both
    outputs moved once."""
    rows = case.batch * case.num_heads * case.head_dim
    keys = case.batch * case.teacher_window * case.num_kv_heads * case.head_dim
    size = jnp.dtype(case.dtype).itemsize
    return Work(flops=4.0 * rows * case.teacher_window, bytes=float(size * (2 * keys + 3 * rows)))
