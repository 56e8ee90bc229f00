"""Decode attention against the definition and, on a GPU, JAX's own attention twice."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ttcd_kernels import launch
from ttcd_kernels.decode import triton_call
from ttcd_kernels.decode.api import Implementation, decode_attention
from ttcd_kernels.decode.reference import visible_slots
from ttcd_kernels.decode.shapes import SHAPES as SHAPES
from ttcd_kernels.decode.shapes import Case
from ttcd_kernels.decode.tuning import CANDIDATES, Tuning, tuning_for
from ttcd_kernels.measure import Search, Work
from ttcd_kernels.windows import Results, Windows

BASELINE = "xla"  # ratios are times over this one's
PEERS = ("jax.nn",)  # names of what is not ours begin so: they may refuse a shape


def operand_shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """q and both caches. Positions are constants of the programs."""
    q = jax.ShapeDtypeStruct((case.batch, case.num_heads, case.head_dim), case.dtype)
    slots = case.num_slots or case.teacher_window
    cache = jax.ShapeDtypeStruct((case.batch, slots, case.num_kv_heads, case.head_dim), case.dtype)
    return [q, cache, cache]


def programs(case: Case) -> dict[tuple[str, str], Callable]:
    """(direction, implementation) -> function of the operands."""

    def dual(implementation: Implementation) -> Callable:
        def call(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> Any:
            return decode_attention(
                q,
                k_cache,
                v_cache,
                jnp.asarray(case.positions),
                teacher_window=case.teacher_window,
                student_window=case.student_window,
                implementation=implementation,
            )

        return call

    found: dict[tuple[str, str], Callable] = {
        ("forward", "xla"): dual("xla"),
        ("forward", "reference"): dual("reference"),
    }
    if jax.default_backend() == "gpu":
        found["forward", "triton"] = dual("triton")
        found["forward", "jax.nn twice"] = functools.partial(_stock, case)
    return found


def searches(case: Case) -> dict[str, Search]:
    """The one kernel's tiles to try, and a program with each."""
    capability = launch.capability()
    assert capability is not None
    table = tuning_for(capability, case.head_dim, jnp.dtype(case.dtype).itemsize)
    windows = Windows(case.teacher_window, case.student_window, case.head_dim**-0.5)

    def program(tuning: Tuning) -> Callable:
        def call(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array) -> Results:
            position = jnp.asarray(case.positions)
            return triton_call.decode(q, k_cache, v_cache, position, windows, tuning=tuning)

        return call

    tunings = dict.fromkeys((table, *CANDIDATES))
    return {"decode_attention": Search({tuning: program(tuning) for tuning in tunings}, table)}


def work(case: Case, direction: str) -> Work:
    """Both products of each head with the teacher's window; its keys and values once, q, and both
    outputs."""
    assert direction == "forward", direction
    rows = case.batch * case.num_heads * case.head_dim
    keys = case.batch * case.teacher_window * case.num_kv_heads * case.head_dim
    size = jnp.dtype(case.dtype).itemsize
    return Work(flops=4.0 * rows * case.teacher_window, bytes=float(size * (2 * keys + 3 * rows)))


def reference_bytes(case: Case) -> int:
    """Size of the caches in float32, a copy for every query head."""
    slots = case.num_slots or case.teacher_window
    return 8 * case.batch * slots * case.num_heads * case.head_dim


def _stock(
    case: Case, q: jax.Array, k_cache: jax.Array, v_cache: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One masked call per window."""

    def attend(window: int) -> jax.Array:
        visible = visible_slots(jnp.asarray(case.positions), k_cache.shape[1], window)
        out = jax.nn.dot_product_attention(
            q[:, None], k_cache, v_cache, mask=visible[:, None, None], implementation="xla"
        )
        return out[:, 0]

    return attend(case.teacher_window), attend(case.student_window)
