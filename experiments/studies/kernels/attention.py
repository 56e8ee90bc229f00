"""Cases of dual-window attention: shapes, its definition, its implementations, two single-window
calls and, on a GPU, cuDNN."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ttcd_kernels import dual_window_attention_with_lse, launch
from ttcd_kernels.dual_window import mosaic_call, triton_call, tuning
from ttcd_kernels.dual_window.api import Implementation
from ttcd_kernels.windows import Windows

from experiments.studies.kernels import definition
from experiments.studies.kernels.programs import Program, Work, compared

INPUTS = 3  # q, k, v


class Case(NamedTuple):
    """One call: windows count the query itself, `None` sees everything."""

    name: str
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    teacher_window: int | None
    student_window: int | None
    batch: int = 1
    num_keys: int | None = None  # None: as many as queries, which are the last of them
    scale: float | None = None
    has_documents: bool = False
    dtype: str = "bfloat16"
    rounds: int = 5
    num_compared: int | None = None  # the last queries and keys of the last row; None: all

    @property
    def keys(self) -> int:
        return self.num_keys or self.length

    @property
    def windows(self) -> Windows:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return Windows(self.teacher_window or self.keys, self.student_window or self.keys, scale)

    @property
    def ids(self) -> np.ndarray | None:
        """Five documents in the first row, of which the second and the last are one token; in the
        second row two, which come again."""
        if not self.has_documents:
            return None
        S, key, b = self.keys, np.arange(self.keys), np.arange(self.batch)[:, None] % 2
        once = np.searchsorted((S // 3, S // 3 + 1, 2 * S // 3, S - 1), key, side="right")
        return np.where(b == 1, key * 9 // S % 2, once).astype(np.int32)


# Halo in odd numbers, grouped heads, every head dim; a scale that turns the order of scores round.
# Of 338/82, 194/66 and 1253/488 the windows end one key into a tile, or one before its end: a list
# of tiles that is off by one shows.
_CHECK = (
    Case("257 of 301, 100/45 H4/2 D64", 257, 4, 2, 64, 100, 45, batch=2, num_keys=301),
    Case("129 of 401, 338/82 H4/1 D128", 129, 4, 1, 128, 338, 82, num_keys=401),
    Case("200, full/1 H2/1 D32, scale -0.1", 200, 2, 1, 32, None, 1, scale=-0.1),
    Case("131 of 333, 100/45 H3/1 D80", 131, 3, 1, 80, 100, 45, num_keys=333),
    Case("257, 194/66 H2/2 D96", 257, 2, 2, 96, 194, 66),
)
# Once: one query, equal windows, exponentials that overflow, every loop and sums so long that their
# rounding to 16 bits shows, and offsets past 2^31.
_MORE = (
    Case("1 of 200, 150/70 H4/2 D128", 1, 4, 2, 128, 150, 70, num_keys=200),
    Case("200, 64/64 H2/1 D64, scale 0", 200, 2, 1, 64, 64, 64, scale=0.0),
    Case("77 of 301, 150/70 H2/1 D64, scale 4", 77, 2, 1, 64, 150, 70, 1, 301, 4, dtype="float16"),
    Case("4095 of 4197, 1253/488 H4/2 D128", 4095, 4, 2, 128, 1253, 488, num_keys=4197),
    Case("4095 of 4197, 1253/488 H4/2 D128", 4095, 4, 2, 128, 1253, 488, 1, 4197, dtype="float16"),
    Case("4K 1024/512 documents", 4096, 2, 2, 64, 1024, 512, batch=2, has_documents=True),
    Case("2 x 514K 64/32 H16/2 D128", 526_336, 16, 2, 128, 64, 32, batch=2, num_compared=300),
)
SHAPES: dict[str, tuple[Case, ...]] = {
    "tiny": (
        Case("64 tokens, 16/8", 64, 4, 2, 8, 16, 8, batch=2, dtype="float32", rounds=3),
        Case("48 tokens, full/8", 48, 2, 2, 8, None, 8, dtype="float32", rounds=3),
    ),
    "cpu": (
        Case("4K 2048/1024 H16 D64", 4096, 16, 16, 64, 2048, 1024, dtype="float32", rounds=3),
        Case("32K 2048/1024 H16 D64", 32768, 16, 16, 64, 2048, 1024, dtype="float32", rounds=1),
    ),
    "paper": (
        Case("64K 8192/4096 H16/8 D128", 65536, 16, 8, 128, 8192, 4096),
        Case("760M: 32K 2048/1024 H24 D64", 32768, 24, 24, 64, 2048, 1024),
    ),
    "more": (
        Case("4 x 64K 8192/4096 H16/8 D128", 65536, 16, 8, 128, 8192, 4096, batch=4),
        Case("64K 2048/1024 H16/8 D128", 65536, 16, 8, 128, 2048, 1024),
        Case("64K 16384/8192 H16/8 D128", 65536, 16, 8, 128, 16384, 8192),
        Case("64K 8192/7936 H16/8 D128", 65536, 16, 8, 128, 8192, 7936),
        Case("64K full/2048 H16/8 D128", 65536, 16, 8, 128, None, 2048),
        Case("760M: 4 x 32K 2048/1024 H24 D64", 32768, 24, 24, 64, 2048, 1024, batch=4),
        Case("340M: 4 x 32K 2048/1024 H16 D64", 32768, 16, 16, 64, 2048, 1024, batch=4),
        Case("256K 8192/4096 H16/8 D128", 262_144, 16, 8, 128, 8192, 4096, rounds=3),
        Case("1M 8192/4096 H16/8 D128", 1_048_576, 16, 8, 128, 8192, 4096, rounds=3),
    ),
    "check": (
        *(
            case._replace(name=case.name + " documents" * ids, dtype=dtype, has_documents=ids)
            for case, dtype, ids in itertools.product(_CHECK, launch.DTYPES, (False, True))
        ),
        *_MORE,
    ),
}


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """q, k, v and the cotangents of both outputs and both log-sum-exps."""
    B, T, N, K, H = case.batch, case.length, case.num_heads, case.num_kv_heads, case.head_dim
    wide, narrow = (
        jax.ShapeDtypeStruct(shape, case.dtype) for shape in ((B, T, N, H), (B, case.keys, K, H))
    )
    row = jax.ShapeDtypeStruct((B, T, N), jnp.promote_types(case.dtype, jnp.float32))
    return [wide, narrow, narrow, wide, wide, row, row]


def expected(case: Case, operands: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """What is `compared`, by name. The last keys are seen by the last queries alone."""
    q, *kv, d_teacher, d_student, d_teacher_lse, d_student_lse = operands
    if case.num_compared is not None:
        far = case.num_compared + case.windows.teacher - 1
        kv = [x[-1:, -far:] for x in kv]
    cotangents = compared(case, [q, d_teacher, d_student, d_teacher_lse, d_student_lse])
    arrays = [np.asarray(x).astype(np.float64) for x in (cotangents[0], *kv, *cotangents[1:])]
    results = definition.dual_window(*arrays, ids=case.ids, windows=case.windows)
    return dict(zip(definition.NAMES, compared(case, results), strict=True))


def work(case: Case, direction: str) -> Work:
    """Two matrix products per query-key pair of the teacher's window, seven with the gradients;
    every array moved once."""
    window = case.windows.within(case.length).teacher  # cases that are timed have no halo
    pairs = window * case.length - window * (window - 1) // 2
    products = {"forward": 2, "fwd + bwd": 7}[direction]
    wide, narrow = (x.size * x.dtype.itemsize for x in operand_shapes(case)[:2])
    moved = {"forward": 3 * wide + 2 * narrow, "fwd + bwd": 10 * wide + 6 * narrow}[direction]
    flops = products * 2 * pairs * case.batch * case.num_heads * case.head_dim
    return Work(flops, moved)


def alone(case: Case, kernel: str, tile: tuning.Tile) -> Program:
    """One kernel with a tile as a function, and its operands: of a case without documents."""
    q, k, v, *_ = operand_shapes(case)
    row = jax.ShapeDtypeStruct((2, case.batch, case.num_heads, case.length), jnp.float32)
    cotangents = [jax.ShapeDtypeStruct((2, *q.shape), q.dtype), row, row]
    windows = case.windows.within(case.length)
    run = functools.partial(triton_call.launch_kernel, kernel, windows, tile)
    operands = [q, k, v] + (cotangents if kernel != "forward" else [])
    return lambda q, k, v, *more: run(q, k, v, None, *more), operands


def implementations(case: Case) -> dict[str, Callable[..., Any]]:
    """(q, k, v) -> (teacher, student, teacher lse, student lse); peers give outputs alone."""
    windows = {"teacher_window": case.teacher_window, "student_window": case.student_window}
    ids = None if case.ids is None else jnp.asarray(case.ids)

    def dual(implementation: Implementation) -> Callable[..., Any]:
        options: Any = {"segment_ids": ids, "scale": case.scale, "implementation": implementation}
        return functools.partial(dual_window_attention_with_lse, **windows, **options)

    functions = {"xla": dual("xla"), "lse": dual("lse")}
    qkv: Any = operand_shapes(case)[:3]
    if triton_call.unsupported(*qkv) is None:
        functions["triton"] = dual("triton")
    if mosaic_call.unsupported(*qkv) is None and case.windows.scale > 0:
        functions["mosaic"] = dual("mosaic")
    if case.has_documents or case.scale is not None or case.num_keys:  # peers are called without
        return functions
    if jax.default_backend() == "gpu":
        functions["cudnn teacher"] = functools.partial(_cudnn, [case.teacher_window])
        functions["cudnn both"] = functools.partial(_cudnn, windows.values())
    return functions


def _cudnn(windows: Iterable[int | None], *qkv: Any) -> tuple[jax.Array, ...]:
    """A call per window, each with its own gradient."""
    attend: Any = functools.partial(jax.nn.dot_product_attention, *qkv, implementation="cudnn")
    sizes = (None if window is None else (window - 1, 0) for window in windows)
    return tuple(attend(is_causal=True, local_window_size=size) for size in sizes)
