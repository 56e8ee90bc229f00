"""Dual-window attention and what it is measured against: its own forms, two single-window calls,
and, on a GPU, cuDNN and (where it is installed) tokamax."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

from ttcd_kernels import launch
from ttcd_kernels.dual_window import cudnn, lse, mosaic_call, triton_call
from ttcd_kernels.dual_window.api import (
    Implementation,
    dual_window_attention,
    window_attention,
)
from ttcd_kernels.dual_window.shapes import SHAPES, Case
from ttcd_kernels.dual_window.tuning import CANDIDATES, Tile, tuning_for
from ttcd_kernels.measure import Search, Work
from ttcd_kernels.windows import Windows

__all__ = [
    "BASELINE",
    "PEERS",
    "SHAPES",
    "operand_shapes",
    "programs",
    "reference_bytes",
    "searches",
    "work",
]

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
    """By (direction, implementation): the forward, and the forward with the gradients of q, k,
    v."""
    found = {}
    for name, attend in _implementations(case).items():
        found["forward", name] = _forward(attend)
        found["fwd + bwd", name] = _gradient(attend)
    return found


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


def searches(case: Case) -> dict[str, Search]:
    """Per kernel: the tiles to try, and a program with each."""
    capability = launch.capability()
    assert capability is not None
    table = tuning_for(capability, case.head_dim)

    def program(kernel: str, tile: Tile) -> Callable[..., Any]:
        tuning = dataclasses.replace(table, **{kernel: tile})

        def attend(q, k, v):
            return triton_call.dual_window(q, k, v, None, _windows(case), tuning)[:2]

        return _forward(attend) if kernel == "forward" else _gradient(attend)

    found = {}
    for field in dataclasses.fields(table):
        tiles = dict.fromkeys((getattr(table, field.name), *CANDIDATES))
        programs = {tile: program(field.name, tile) for tile in tiles}
        found[field.name] = Search(programs, getattr(table, field.name))
    return found


def _implementations(case: Case) -> dict[str, Callable[..., Any]]:
    """(q, k, v) -> (teacher, student); peers that do one window only return a tuple of one."""
    windows = case.teacher_window, case.student_window

    def dual(implementation: Implementation) -> Callable[..., Any]:
        def call(q, k, v):
            return dual_window_attention(
                q,
                k,
                v,
                teacher_window=case.teacher_window,
                student_window=case.student_window,
                implementation=implementation,
            )

        return call

    def single(implementation: Implementation, *windows: int | None) -> Callable[..., Any]:
        def call(q, k, v):
            return tuple(
                window_attention(q, k, v, window=w, implementation=implementation) for w in windows
            )

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
    def call(q, k, v):
        return lse.dual_window(q, k, v, None, _windows(case), attend)[:2]

    return call


def _stock(attention: Callable[..., Any], implementation: str, *windows: int | None):
    """One call per window, with gradients of their own."""

    def call(q, k, v):
        return tuple(
            attention(
                q,
                k,
                v,
                is_causal=True,
                local_window_size=None if window is None else (window - 1, 0),
                implementation=implementation,
            )
            for window in windows
        )

    return call


def _forward(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, d_teacher, d_student: attend(q, k, v)


def _gradient(attend: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(q, k, v, d_teacher, d_student):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull((d_teacher, d_student)[: len(out)])

    return gradient
