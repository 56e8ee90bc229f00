"""Dual-window attention as it is measured and compiled ahead of time: its shapes, its own forms,
two single-window calls and, on a GPU, cuDNN and (where it is installed) tokamax."""

import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ttcd_kernels import launch, measure
from ttcd_kernels.aot import Compiled, compile_kernels
from ttcd_kernels.dual_window import cudnn, lse, mosaic_aot, mosaic_call, triton_call
from ttcd_kernels.dual_window.api import (
    Implementation,
    dual_window_attention,
    dual_window_attention_with_lse,
    window_attention,
)
from ttcd_kernels.dual_window.tuning import (
    CANDIDATES,
    HEAD_DIMS,
    MOSAIC_TILES,
    Tuning,
    tuning_for,
)
from ttcd_kernels.measure import SetName, Work
from ttcd_kernels.windows import Windows

PEERS = ("cudnn", "tokamax")  # names of foreign implementations begin so: they may refuse a shape


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
    dtype: str = "bfloat16"
    rounds: int = 5

    @property
    def windows(self) -> Windows:
        return Windows(self.teacher_window or self.length, self.student_window, self.head_dim**-0.5)


SHAPES: dict[SetName, tuple[Case, ...]] = {
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
    "parity": (
        Case("300, 100/45 H4/2 D64", 300, 4, 2, 64, 100, 45, dtype="float32"),
        Case("300, 100/45 H4/2 D64", 300, 4, 2, 64, 100, 45, batch=2),
        Case("257, 130/129 H2/2 D128", 257, 2, 2, 128, 130, 129, dtype="float16"),
        Case("200, full/1 H2/1 D32", 200, 2, 1, 32, None, 1),
    ),
}


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """q, k, v and the cotangents of both results."""
    wide, narrow = (
        jax.ShapeDtypeStruct((case.batch, case.length, heads, case.head_dim), case.dtype)
        for heads in (case.num_heads, case.num_kv_heads)
    )
    return [wide, narrow, narrow, wide, wide]


def programs(case: Case) -> dict[tuple[str, str], Callable[..., Any]]:
    """(direction, implementation) -> function of the operands."""
    return measure.both_directions(_implementations(case), 3)


def work(case: Case, direction: str) -> Work:
    """Two matrix products per key pair of the teacher's window, seven with the gradients; every
    array once."""
    window = case.windows.within(case.length).teacher
    pairs = window * case.length - window * (window - 1) // 2
    products = {"forward": 2, "fwd + bwd": 7}[direction]
    shapes = operand_shapes(case)
    wide, narrow = (shape.size * shape.dtype.itemsize for shape in shapes[:2])
    moved = {"forward": 3 * wide + 2 * narrow, "fwd + bwd": 10 * wide + 6 * narrow}[direction]
    flops = products * 2 * pairs * case.batch * case.num_heads * case.head_dim
    return Work(flops, moved)


def reference_bytes(case: Case) -> int:
    """Size of one full [B, N, T, T] score matrix in float32."""
    return 4 * case.batch * case.num_heads * case.length**2


def searches(case: Case) -> dict[str, measure.Search]:
    """Per kernel: the tiles to try, and a program with each."""

    def attend(tuning: Tuning) -> Callable[..., Any]:
        return lambda q, k, v: triton_call.dual_window(q, k, v, None, case.windows, tuning=tuning)[
            :2
        ]

    table = tuning_for(launch.known_capability(), case.head_dim)
    return measure.searches(table, CANDIDATES, attend, 3)


def _implementations(case: Case) -> dict[str, Callable[..., Any]]:
    """(q, k, v) -> (teacher, student); peers that do one window only return a tuple of one."""
    windows = case.teacher_window, case.student_window

    def dual(implementation: Implementation) -> Callable[..., Any]:
        reach = {"teacher_window": case.teacher_window, "student_window": case.student_window}
        return functools.partial(dual_window_attention, **reach, implementation=implementation)

    def single(implementation: Implementation, *windows: int | None) -> Callable[..., Any]:
        def call(*qkv: jax.Array) -> tuple[jax.Array, ...]:
            attend = functools.partial(window_attention, *qkv, implementation=implementation)
            return tuple(attend(window=window) for window in windows)

        return call

    found = {"xla": dual("xla"), "xla two calls": single("xla", *windows)}
    found["reference"] = dual("reference")
    if jax.default_backend() != "gpu":
        return found | {"lse": dual("lse")}
    qkv: Any = operand_shapes(case)[:3]
    if triton_call.unsupported(*qkv) is None:
        found |= {
            "triton": dual("triton"),
            "triton teacher": single("triton", case.teacher_window),
            "lse triton": _lse(case, lse.of_own(triton_call.dual_window)),
        }
    if mosaic_call.unsupported(*qkv) is None:
        found["mosaic"] = dual("mosaic")
    if cudnn.unsupported(*qkv) is None:
        found |= {
            "lse cudnn": _lse(case, cudnn.attend),
            "cudnn teacher": _stock(jax.nn.dot_product_attention, "cudnn", windows[0]),
            "cudnn both": _stock(jax.nn.dot_product_attention, "cudnn", *windows),
        }
    if importlib.util.find_spec("tokamax") is not None:
        tokamax = importlib.import_module("tokamax")
        found |= {
            "tokamax teacher": _stock(tokamax.dot_product_attention, "mosaic", windows[0]),
            "tokamax both": _stock(tokamax.dot_product_attention, "mosaic", *windows),
        }
    return found


def _lse(case: Case, attend: lse.SingleWindow) -> Callable[..., Any]:
    return lambda q, k, v: lse.dual_window(q, k, v, None, case.windows, attend)[:2]


def _stock(
    attention: Callable[..., Any], implementation: str, *windows: int | None
) -> Callable[..., Any]:
    """One call per window, with gradients of their own."""
    attend = functools.partial(attention, is_causal=True, implementation=implementation)

    def call(*qkv: jax.Array) -> tuple[jax.Array, ...]:
        sizes = (None if window is None else (window - 1, 0) for window in windows)
        return tuple(attend(*qkv, local_window_size=size) for size in sizes)

    return call


def variants(capability: int) -> Iterator[tuple[str, list[Compiled]]]:
    """(name, forward and both backward kernels) of each head dim, plain and with documents; for
    Hopper also the Mosaic forward, where its compiler is installed."""
    for head_dim, has_segments in itertools.product(HEAD_DIMS, (False, True)):
        name = f"D{head_dim}" + " documents" * has_segments
        yield name, compile_gradient(capability, head_dim, has_segments)[0]
    if capability != mosaic_call.CAPABILITY:
        return
    reason = mosaic_aot.unavailable()
    if reason is not None:
        print(f"without the Mosaic kernel: {reason}", file=sys.stderr)
        return
    for head_dim in MOSAIC_TILES:
        yield f"D{head_dim} Mosaic", [mosaic_aot.compile_mosaic(head_dim)]


def compile_gradient(
    capability: int, head_dim: int, has_segments: bool = False
) -> tuple[list[Compiled], list[str]]:
    """The kernels of one forward and backward, and the names in launch order. The machine code does
    not depend on the length, longer than any tile, or on the windows."""
    q = jax.ShapeDtypeStruct((1, 65_536, 16, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 65_536, 8, head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 65_536), jnp.int32) if has_segments else None

    def gradient(
        q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        options: Any = {"teacher_window": 8192, "student_window": 4096, "implementation": "triton"}
        attend = functools.partial(dual_window_attention_with_lse, segment_ids=ids, **options)
        results, pull = jax.vjp(attend, q, k, v)
        return pull(results)

    return compile_kernels(gradient, q, k, k, ids, capability=capability)
