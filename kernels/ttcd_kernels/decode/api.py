"""Public entry points of decode attention, which check shapes and windows."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NoReturn, NotRequired, TypedDict, Unpack

import jax
import jax.numpy as jnp

from ttcd_kernels.decode import triton_call, xla
from ttcd_kernels.dispatch import Candidate, choose
from ttcd_kernels.windows import Cache, Position, Query, Results, Windows, check_operands, checked

Implementation = Literal["auto", "triton", "xla"]
# "auto" takes the first that can run and needs no check, or has had it.
CANDIDATES = {
    "triton": Candidate(triton_call.decode, triton_call.unsupported, needs_check=True),
    "xla": Candidate(xla.decode),
}


def decode_attention_with_lse(
    q: Query,
    k_cache: Cache,
    v_cache: Cache,
    position: Position,
    *,
    teacher_window: int,
    student_window: int,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Results:
    """Attention of one query per row, q [B, N, H], over its cache [B, W, K, H] under two sliding
    windows: (teacher, student [B, N, H], teacher lse, student lse [B, N]), with sums over the slots
    s that a window sees:

        lse = log sum_s exp(scale * q . k_s),    out = sum_s exp(scale * q . k_s - lse) v_s

    `position` is that of each row's query, whose key and value are in the cache already. A row's
    cache is a ring: position p is stored in slot p mod W, W at least `teacher_window`. Slot s holds
    the position d = (position - s) mod W before the query's. A window w counts the query itself and
    sees only written slots, d < w and d <= position: at position 0 the query alone, at a negative
    position nothing (outputs 0, lse -inf). Unseen slots must be finite. `scale` defaults to
    H**-0.5. Query head n reads kv head n // (N / K). Sums and log-sum-exps are float32 (float64 for
    float64 inputs). Not differentiable. `vmap` and meshes shard batch and kv heads without
    communication.

    `implementation`: "triton" is two kernels for GPUs of compute capability 8.0 and up, head dims
    32, 64, 80, 96, 128, up to 64 query heads per kv head: one reads each key of the teacher's
    window once, in slices, the other merges these. Heads of 80 and 96 are multiplied as 128 columns
    (1.6 and 1.33 times the products), and read and written as they are. "xla" masks the whole
    cache; "auto" is "triton" where it can run and has been checked, else "xla". Raises `ValueError`
    for shapes or windows that do not fit, naming both numbers, and when differentiated.
    """
    check_operands("B N H", q=q, k_cache=k_cache, v_cache=v_cache)
    B = len(q)
    if k_cache.shape[0] != B:
        raise ValueError(f"q has {B} rows and the cache {k_cache.shape[0]}: give each row its ring")
    if position.shape != (B,):
        raise ValueError(f"position has shape {position.shape}: {B} queries need ({B},)")
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"position is {position.dtype.name}: it must be int32")
    windows = checked(teacher_window, student_window, scale, *k_cache.shape[1::2])
    if k_cache.shape[1] < windows.teacher:
        raise ValueError(
            f"a cache of {k_cache.shape[1]} slots cannot hold the {windows.teacher} positions of "
            f"teacher_window: give it at least {windows.teacher}"
        )
    run = choose("decode attention", implementation, CANDIDATES, q, k_cache, v_cache)
    return _run(run, windows, q, k_cache, v_cache, position)


class Options(TypedDict):
    """Options of both calls, as in `decode_attention_with_lse`."""

    teacher_window: int
    student_window: int
    scale: NotRequired[float | None]
    implementation: NotRequired[Implementation]


def decode_attention(
    q: Query, k_cache: Cache, v_cache: Cache, position: Position, **options: Unpack[Options]
) -> tuple[Query, Query]:
    """(teacher, student) outputs of `decode_attention_with_lse`."""
    return decode_attention_with_lse(q, k_cache, v_cache, position, **options)[:2]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(run: Callable[..., Any], windows: Windows, *arrays: Any) -> Any:
    return run(*arrays, windows)


@_run.defjvp
def _refuse(*_: Any) -> NoReturn:
    raise ValueError(
        "decode_attention is not differentiable: it serves generation from a cache; train through "
        "dual_window_attention on whole sequences"
    )
