"""Time and memory of dual-window attention against two single-window calls, the definition and, on
a GPU, cuDNN."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import measure
from ttcd_kernels.dual_window.api import (
    Implementation,
    dual_window_attention,
    window_attention,
)
from ttcd_kernels.dual_window.shapes import SHAPES, Case, SetName

BASELINE = "xla"  # ratios are times over this one's
HEADER = ("case", "pass", "implementation", "time ms", "/ xla", "temp MiB", "note")


class Row(NamedTuple):
    """One implementation in one direction. `seconds` is None where only memory is known."""

    case: str
    direction: str
    implementation: str
    seconds: float | None
    ratio: float | None
    temp_bytes: int | None
    note: str


def run(shapes: SetName) -> list[Row]:
    return [row for case in SHAPES[shapes] for row in _measure_case(case)]


def describe(shapes: SetName) -> list[dict[str, Any]]:
    """The measured shapes, for JSON."""
    return [case._asdict() for case in SHAPES[shapes]]


def table(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        time, ratio = measure.milliseconds(row.seconds), measure.ratio(row.ratio)
        memory = measure.mebibytes(row.temp_bytes)
        cells.append((*row[:3], time, ratio, memory, row.note))
    return measure.table(HEADER, cells)


def _implementations(case: Case) -> dict[str, Callable]:
    """(q, k, v) -> (teacher, student), and, where there is a GPU, cuDNN's calls as the stock peer:
    the teacher's window alone, and both windows."""

    def dual(implementation: Implementation) -> Callable:
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

    def two_calls(q, k, v):
        windows = case.teacher_window, case.student_window
        return tuple(window_attention(q, k, v, window=w, implementation="xla") for w in windows)

    def cudnn(*windows: int | None) -> Callable:
        def call(q, k, v):
            return tuple(
                jax.nn.dot_product_attention(
                    q,
                    k,
                    v,
                    is_causal=True,
                    local_window_size=None if window is None else (window - 1, 0),
                    implementation="cudnn",
                )
                for window in windows
            )

        return call

    found = {"xla": dual("xla"), "two calls": two_calls, "reference": dual("reference")}
    if jax.default_backend() != "gpu":
        return found
    teacher, student = case.teacher_window, case.student_window
    stock = {"cudnn teacher": cudnn(teacher), "cudnn both": cudnn(teacher, student)}
    return found | {"triton": dual("triton")} | stock


def _directions(attend: Callable) -> dict[str, Callable]:
    """The forward, and the forward with the gradients for q, k and v."""

    def forward(q, k, v, d_teacher, d_student):
        return attend(q, k, v)

    def gradient(q, k, v, d_teacher, d_student):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull((d_teacher, d_student)[: len(out)])

    return {"forward": forward, "fwd + bwd": gradient}


def _operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """q, k, v and the cotangents of both results."""
    wide, narrow = (
        jax.ShapeDtypeStruct((case.batch, case.length, heads, case.head_dim), case.dtype)
        for heads in (case.num_heads, case.num_kv_heads)
    )
    return [wide, narrow, narrow, wide, wide]


def _operands(shapes: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    rng = np.random.default_rng(0)  # random: zeros run faster on a GPU
    return [
        jnp.asarray(rng.standard_normal(shape.shape, np.float32), shape.dtype) for shape in shapes
    ]


def _measure_case(case: Case) -> list[Row]:
    shapes = _operand_shapes(case)
    programs, memory, notes = {}, {}, {}
    for name, attend in _implementations(case).items():
        for direction, function in _directions(attend).items():
            key = direction, name
            memory[key], notes[key] = None, ""
            if name == "reference" and not _may_compile_reference(case):
                notes[key] = f"skipped: one mask takes {measure.gibibytes(case.score_bytes)}"
                continue
            compiled = jax.jit(function).lower(*shapes).compile()
            memory[key] = measure.temp_bytes(compiled)
            if measure.needed_bytes(compiled) < measure.usable_bytes():
                programs[key] = compiled
            else:
                limit = measure.gibibytes(measure.usable_bytes())
                notes[key] = f"memory only: does not fit in {limit}"
    seconds = _time(programs, _operands(shapes), case.rounds)
    rows = []
    for key in sorted(memory, key=lambda key: key[0] != "forward"):
        direction, name = key
        time, base = seconds.get(key), seconds.get((direction, BASELINE))
        ratio = time / base if time and base else None
        rows.append(Row(case.name, direction, name, time, ratio, memory[key], notes[key]))
    return rows


def _time(programs: dict, operands: list[jax.Array], rounds: int) -> dict:
    """Median seconds per program, forward and gradient in the same rounds."""
    calls = {key: functools.partial(compiled, *operands) for key, compiled in programs.items()}
    return measure.median_seconds(calls, rounds)


def _may_compile_reference(case: Case) -> bool:
    """Compiling allocates nothing on the CPU; a GPU's compiler tries products out in memory."""
    return jax.default_backend() == "cpu" or case.score_bytes < measure.usable_bytes() // 4
