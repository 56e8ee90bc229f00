"""Public entry points of decode attention: shapes are checked here, before anything is launched."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_kernels.decode import reference, triton_call, xla
from ttcd_kernels.dispatch import Candidate, choose

Implementation = Literal["auto", "triton", "xla", "reference"]
# "auto" takes the first that can run.
CANDIDATES = {
    "triton": Candidate(triton_call.decode, triton_call.unsupported),
    "xla": Candidate(xla.decode),
    "reference": Candidate(reference.decode, is_automatic=False),
}


def decode_attention_with_lse(
    q: Float[Array, "B N H"],
    k_cache: Float[Array, "_ _ K H"],
    v_cache: Float[Array, "_ _ K H"],
    position: Int[Array, " B"],
    *,
    teacher_window: int,
    student_window: int,
    page_table: Int[Array, "B _"] | None = None,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B N H"], Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N"]]:
    """Attention of one query per row over its cache under two sliding windows: (teacher, student,
    teacher lse, student lse).

    `position` is each query's own place in its sequence; rows may be anywhere. Its key and value
    are in the cache already. Caches are rings [B, W, K, H]: position p lies in slot p mod W, W at
    least `teacher_window`. With a `page_table` [B, P] they are pools [num_pages, page_size, K, H]:
    slot s of row b lies in page page_table[b, s // page_size] at s mod page_size, W = P *
    page_size; entries of pages without a visible slot may be anything. Numbers in slots out of
    sight must be finite. A window counts the query itself, and sees only what was written: at
    position 0 the query alone, and nothing at a negative position (outputs 0, lse -inf). `scale`
    defaults to H**-0.5. Query head n reads kv head n // (N / K). Log-sum-exps are natural, float32
    (float64 for float64 inputs).

    `implementation`: "triton" is one kernel for GPUs of compute capability 8.0 and up, head dims
    32, 64, 128, up to 64 query heads per kv head, that reads each key of the teacher's window
    once; "xla" masks the whole cache (and gathers its pages); "reference" is the definition;
    "auto" is the first of "triton" and "xla" that can run. `vmap` and meshes split batch and kv
    heads without communication; a pool's pages are gathered on every device.

    Not differentiable: generation has no gradient.

    Raises:
        ValueError: shapes or windows that do not fit, naming both numbers; differentiation.
    """
    _check_arrays(q, k_cache, v_cache, position, page_table)
    _check_windows(k_cache, page_table, teacher_window, student_window)
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    run = choose("decode attention", implementation, CANDIDATES, q, k_cache, v_cache)
    facts = teacher_window, student_window, scale
    return _run(run, facts, q, k_cache, v_cache, position, page_table)


def decode_attention(
    q: Float[Array, "B N H"],
    k_cache: Float[Array, "_ _ K H"],
    v_cache: Float[Array, "_ _ K H"],
    position: Int[Array, " B"],
    *,
    teacher_window: int,
    student_window: int,
    page_table: Int[Array, "B _"] | None = None,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B N H"], Float[Array, "B N H"]]:
    """(teacher, student) outputs of `decode_attention_with_lse`."""
    teacher, student, _, _ = decode_attention_with_lse(
        q,
        k_cache,
        v_cache,
        position,
        teacher_window=teacher_window,
        student_window=student_window,
        page_table=page_table,
        scale=scale,
        implementation=implementation,
    )
    return teacher, student


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(run: Callable[..., Any], facts: tuple[int, int, float], *arrays: Any) -> Any:
    return run(*arrays, *facts)


@_run.defjvp
def _refuse(run, facts, primals, tangents):
    raise ValueError(
        "decode_attention is not differentiable: it serves generation from a cache; train through "
        "dual_window_attention on whole sequences"
    )


def _check_arrays(q, k_cache, v_cache, position, page_table) -> None:
    B, N, H = q.shape
    if k_cache.shape != v_cache.shape:
        raise ValueError(
            f"k_cache has shape {k_cache.shape} and v_cache {v_cache.shape}: they must be equal"
        )
    if k_cache.shape[3] != H:
        raise ValueError(f"q {q.shape} and k_cache {k_cache.shape} differ in head dimension")
    if N % k_cache.shape[2]:
        raise ValueError(f"{k_cache.shape[2]} kv heads do not divide {N} query heads")
    if page_table is None and k_cache.shape[0] != B:
        raise ValueError(
            f"q has {B} rows and the cache {k_cache.shape[0]}: give each row its ring, or a "
            "page_table with a pool"
        )
    for name, array, ndim in (("position", position, 1), ("page_table", page_table, 2)):
        if array is None:
            continue
        if array.ndim != ndim or array.shape[0] != B:
            shape = f"({B},)" if ndim == 1 else f"({B}, pages per row)"
            raise ValueError(f"{name} has shape {array.shape}: {B} queries need {shape}")
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} is {array.dtype.name}: it must be int32")


def _check_windows(k_cache, page_table, teacher_window: int, student_window: int) -> None:
    if student_window < 1:
        raise ValueError(
            f"student_window is {student_window}: a window counts the query itself, so at least 1"
        )
    if student_window > teacher_window:
        raise ValueError(
            f"student_window {student_window} is wider than teacher_window {teacher_window}: "
            "the student must see no more than the teacher"
        )
    num_slots = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if num_slots < teacher_window:
        raise ValueError(
            f"a cache of {num_slots} slots cannot hold the {teacher_window} positions of "
            f"teacher_window: give it at least {teacher_window}"
        )
