"""Dual-window attention and what it is measured against: its own forms, two single-window calls,
and, on a GPU, cuDNN and (where it is installed) tokamax."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

from ttcd_kernels import launch, measure
from ttcd_kernels.dual_window import cudnn, lse, mosaic_call, triton_call
from ttcd_kernels.dual_window.api import Implementation, dual_window_attention, window_attention
from ttcd_kernels.dual_window.shapes import SHAPES as SHAPES
from ttcd_kernels.dual_window.shapes import Case
from ttcd_kernels.dual_window.tuning import CANDIDATES, Tuning, tuning_for
from ttcd_kernels.measure import Work
from ttcd_kernels.windows import Windows

BASELINE = "xla"  # ratios are times over this one's
PEERS = ("cudnn", "tokamax")  # names of what is not ours begin so: they may refuse a shape


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
    teacher, _ = case.pairs
    products = {"forward": 2, "fwd + bwd": 7}[direction]
    shapes = operand_shapes(case)
    wide, narrow = (shape.size * shape.dtype.itemsize for shape in shapes[:2])
    moved = {"forward": 3 * wide + 2 * narrow, "fwd + bwd": 10 * wide + 6 * narrow}[direction]
    flops = products * 2 * teacher * case.batch * case.num_heads * case.head_dim
    return Work(flops, moved)


def reference_bytes(case: Case) -> int:
    """Size of one full [B, N, T, T] score matrix in float32."""
    return 4 * case.batch * case.num_heads * case.length**2


def searches(case: Case) -> dict[str, measure.Search]:
    """Per kernel: the tiles to try, and a program with each."""
    capability = launch.capability()
    assert capability is not None

    def attend(tuning: Tuning) -> Callable[..., Any]:
        def call(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            return triton_call.dual_window(q, k, v, None, _windows(case), tuning=tuning)[:2]

        return call

    return measure.searches(tuning_for(capability, case.head_dim), CANDIDATES, attend, 3)


def _implementations(case: Case) -> dict[str, Callable[..., Any]]:
    """(q, k, v) -> (teacher, student); peers that do one window only return a tuple of one."""
    windows = case.teacher_window, case.student_window

    def dual(implementation: Implementation) -> Callable[..., Any]:
        return functools.partial(
            dual_window_attention,
            teacher_window=case.teacher_window,
            student_window=case.student_window,
            implementation=implementation,
        )

    def single(implementation: Implementation, *windows: int | None) -> Callable[..., Any]:
        def call(*qkv: jax.Array) -> tuple[jax.Array, ...]:
            attend = functools.partial(window_attention, *qkv, implementation=implementation)
            return tuple(attend(window=window) for window in windows)

        return call

    found = {
        "xla": dual("xla"),
        "xla two calls": single("xla", *windows),
        "reference": dual("reference"),
    }
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
            "cudnn teacher": _stock(jax.nn.dot_product_attention, "cudnn", case.teacher_window),
            "cudnn both": _stock(jax.nn.dot_product_attention, "cudnn", *windows),
        }
    if importlib.util.find_spec("tokamax") is not None:
        tokamax = importlib.import_module("tokamax")
        found |= {
            "tokamax teacher": _stock(tokamax.dot_product_attention, "mosaic", windows[0]),
            "tokamax both": _stock(tokamax.dot_product_attention, "mosaic", *windows),
        }
    return found


def _windows(case: Case) -> Windows:
    return Windows(case.teacher_window or case.length, case.student_window, case.head_dim**-0.5)


def _lse(case: Case, attend: lse.SingleWindow) -> Callable[..., Any]:
    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lse.dual_window(q, k, v, None, _windows(case), attend)[:2]

    return call


def _stock(
    attention: Callable[..., Any], implementation: str, *windows: int | None
) -> Callable[..., Any]:
    """One call per window, with gradients of their own."""
    attend = functools.partial(attention, is_causal=True, implementation=implementation)

    def call(*qkv: jax.Array) -> tuple[jax.Array, ...]:
        sizes = (None if window is None else (window - 1, 0) for window in windows)
        return tuple(attend(*qkv, local_window_size=size) for size in sizes)

    return call
