"""Cases of dual-window attention for `bench`, `tune` and machine code: shapes, its implementations,
two single-window calls and, on a GPU, cuDNN and (where it is installed) tokamax."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ttcd_kernels import launch
from ttcd_kernels.dual_window import mosaic_call, triton_call, tuning
from ttcd_kernels.dual_window.api import Implementation, dual_window_attention, window_attention
from ttcd_kernels.measure import Program, Work
from ttcd_kernels.windows import Windows

PEERS = ("cudnn", "tokamax")  # name prefixes of foreign implementations, which may refuse a shape


class Case(NamedTuple):
    """One call: windows count the query itself, `None` sees everything."""

    name: str
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    teacher_window: int | None
    student_window: int
    batch: int = 1
    has_documents: bool = False  # three in every row
    dtype: str = "bfloat16"
    rounds: int = 5

    @property
    def windows(self) -> Windows:
        return Windows(self.teacher_window or self.length, self.student_window, self.head_dim**-0.5)


_PARITY = (
    Case("300, 100/45 H4/2 D64", 300, 4, 2, 64, 100, 45, dtype="float32"),
    Case("300, 100/45 H4/2 D64", 300, 4, 2, 64, 100, 45, batch=2),
    Case("257, 130/129 H2/2 D128", 257, 2, 2, 128, 130, 129, dtype="float16"),
    Case("200, full/1 H2/1 D32", 200, 2, 1, 32, None, 1),
    Case("300, 100/45 H4/2 D80", 300, 4, 2, 80, 100, 45),
    Case("257, full/64 H2/2 D96", 257, 2, 2, 96, None, 64),
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
        Case("4 x 64K 8192/4096 H16/8 D128", 65536, 16, 8, 128, 8192, 4096, batch=4),
        Case("64K 2048/1024 H16/8 D128", 65536, 16, 8, 128, 2048, 1024),
        Case("64K 16384/8192 H16/8 D128", 65536, 16, 8, 128, 16384, 8192),
        Case("64K 8192/7936 H16/8 D128", 65536, 16, 8, 128, 8192, 7936),
        Case("64K full/2048 H16/8 D128", 65536, 16, 8, 128, None, 2048),
        Case("760M: 32K 2048/1024 H24 D64", 32768, 24, 24, 64, 2048, 1024),
        Case("760M: 4 x 32K 2048/1024 H24 D64", 32768, 24, 24, 64, 2048, 1024, batch=4),
        Case("340M: 4 x 32K 2048/1024 H16 D64", 32768, 16, 16, 64, 2048, 1024, batch=4),
        Case("256K 8192/4096 H16/8 D128", 262_144, 16, 8, 128, 8192, 4096, rounds=3),
        Case("1M 8192/4096 H16/8 D128", 1_048_576, 16, 8, 128, 8192, 4096, rounds=3),
    ),
    "parity": _PARITY,
    # Long enough for every loop of the kernels, and their pipelines, in the last.
    "check": tuple(
        case._replace(name=case.name + " documents" * ids, dtype=dtype, has_documents=ids)
        for case in (*_PARITY[1:], Case("4K 1024/512 H4/2 D128", 4096, 4, 2, 128, 1024, 512))
        for dtype in launch.DTYPES
        for ids in (False, True)
    ),
}


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """q, k, v and the cotangents of both results."""
    wide, narrow = (
        jax.ShapeDtypeStruct((case.batch, case.length, heads, case.head_dim), case.dtype)
        for heads in (case.num_heads, case.num_kv_heads)
    )
    return [wide, narrow, narrow, wide, wide]


def work(case: Case, direction: str) -> Work:
    """Two matrix products per query-key pair of the teacher's window, seven with the gradients;
    every array moved once."""
    window = case.windows.within(case.length).teacher
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
    """(q, k, v) -> (teacher, student); peers with one window return a tuple of one."""
    teacher, student = case.teacher_window, case.student_window
    ids = None
    if case.has_documents:
        row = jnp.arange(case.length) * 3 // case.length
        ids = jnp.broadcast_to(row, (case.batch, case.length))
    single = functools.partial(window_attention, segment_ids=ids)

    def dual(implementation: Implementation) -> Callable[..., Any]:
        windows = {"teacher_window": teacher, "student_window": student}
        attend = functools.partial(dual_window_attention, segment_ids=ids, **windows)
        return functools.partial(attend, implementation=implementation)

    def each(
        attend: Callable[..., Any], implementation: str, *windows: int | None
    ) -> Callable[..., Any]:
        """A call per window, each with its own gradient."""
        attend = functools.partial(attend, implementation=implementation)
        return lambda *qkv: tuple(attend(*qkv, window=window) for window in windows)

    functions = {"xla": dual("xla"), "xla two calls": each(single, "xla", teacher, student)}
    qkv: Any = operand_shapes(case)[:3]
    if triton_call.unsupported(*qkv) is None:
        functions |= {"triton": dual("triton"), "triton teacher": each(single, "triton", teacher)}
    if mosaic_call.unsupported(*qkv) is None:
        functions["mosaic"] = dual("mosaic")
    if case.has_documents:  # the peers do not support them
        return functions
    peers = {"cudnn": (jax.nn, "cudnn")} if jax.default_backend() == "gpu" else {}
    if importlib.util.find_spec("tokamax") is not None:
        peers["tokamax"] = importlib.import_module("tokamax"), "mosaic"
    for name, (library, implementation) in peers.items():
        stock = functools.partial(_stock, library.dot_product_attention)
        functions[f"{name} teacher"] = each(stock, implementation, teacher)
        functions[f"{name} both"] = each(stock, implementation, teacher, student)
    return functions


def _stock(attention: Callable[..., Any], *qkv: Any, window: int | None, **options: Any) -> Any:
    size = None if window is None else (window - 1, 0)
    return attention(*qkv, is_causal=True, local_window_size=size, **options)
