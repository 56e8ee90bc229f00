"""Memories that change along the row, when the row lies on several devices.

The delta rule maps the state in front of a part affinely to the state behind it; such maps compose,
so one exclusive prefix of them over the devices gives every device its start. LaCT, the ideal and
the renormalised memory are chains of nonlinear steps: the state passes from device to device, and
the devices take turns.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ttcd_jax.memory import delta_rule as delta
from ttcd_jax.memory.chunks import MemoryMask, memory_mask
from ttcd_jax.memory.fast_swiglu import (
    FastInputs,
    FastRule,
    FastWeights,
    continued_swiglu,
    fast_swiglu,
    fresh_state,
)
from ttcd_jax.memory.running import RunningMemory, read_running
from ttcd_jax.sharding import rules, sequence
from ttcd_jax.sharding.memory import check_parts, part_mask

_HEADS = ("batch", "length", "heads", None)
_RATES = ("batch", "length", "heads")


def delta_rule(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N X"],
    beta: Float[Array, "B T N"],
    *,
    log_decay: Float[Array, "B T N"] | None,
    segment_ids: Int[Array, "B T"] | None,
    **facts: Any,
) -> Float[Array, "B T N X"]:
    """o of `ttt.delta_rule.delta_rule` on rows wherever they lie; `facts` are its chunk size and
    state dtype."""
    if not rules.is_distributed():
        o, _ = delta.delta_rule(
            q, k, v, beta, log_decay=log_decay, segment_ids=segment_ids, **facts
        )
        return o

    def in_front(own: delta.Transition) -> jax.Array:
        return sequence.exclusive_prefix(own, delta.compose, delta.unchanged(own)).adds

    def on_part(q, k, v, beta, log_decay, segment_ids):
        is_cut = sequence.num_parts() > 1
        previous = sequence.left_segment(segment_ids) if segment_ids is not None else None
        o, _ = delta.delta_rule(
            q,
            k,
            v,
            beta,
            log_decay=log_decay,
            segment_ids=segment_ids,
            previous_segment=previous,
            carried=in_front if is_cut else None,
            **facts,
        )
        return o

    inputs = (
        *(_HEADS,) * 3,
        _RATES,
        None if log_decay is None else _RATES,
        None if segment_ids is None else ("batch", "length"),
    )
    return rules.sharded(on_part, inputs, _HEADS)(q, k, v, beta, log_decay, segment_ids)


def lact_memory(
    rule: FastRule,
    start: FastWeights,
    inputs: FastInputs,
    segment_ids: Int[Array, "B T"] | None,
    length: int,
) -> Float[Array, "B C L N H"]:
    """`ttt.fast_swiglu.fast_swiglu` on rows of `length` tokens wherever they lie."""
    chunk_size = inputs.q.shape[2]
    if not rules.is_distributed():
        mask = memory_mask(segment_ids, length, chunk_size)
        return fast_swiglu(rule, start, inputs, mask)
    check_parts(length, chunk_size)

    def on_part(start, inputs, segment_ids):
        start, inputs = FastWeights(*start), FastInputs(*inputs)
        if sequence.num_parts() == 1:
            mask = memory_mask(segment_ids, length, chunk_size)
            return fast_swiglu(rule, start, inputs, mask)
        mask = part_mask(segment_ids, inputs.q.shape[1] * chunk_size, chunk_size)

        def step(state):
            return continued_swiglu(rule, start, inputs, mask, state)

        return sequence.passed_along(step, fresh_state(rule, start, inputs))[1]

    chunks = ("batch", "length", None, None)
    arrays = tuple(None if x is None else (*chunks, None)[: x.ndim] for x in inputs)
    names = (
        ((None, None, None),) * 3,
        tuple(() if array is None else array for array in arrays),
        None if segment_ids is None else ("batch", "length"),
    )
    run = rules.sharded(on_part, names, (*chunks, None))
    return run(tuple(start), tuple(inputs), segment_ids)


def running_memory(
    make: Callable[[Any, jax.Array, MemoryMask], RunningMemory],
    chunks: Any,
    w_base: Float[Array, "F D"],
    segment_ids: Int[Array, "B T"] | None,
    length: int,
    chunk_size: int,
) -> tuple[Float[Array, "B C L D"], Float[Array, " B"]]:
    """(y, |W - W_base|_F / eta behind the row) of the memory that `make(chunks, w_base, mask)`
    gives, on rows of `length` tokens wherever they lie. `chunks`: a tuple of arrays
    [B, C, L, ...]."""
    if not rules.is_distributed():
        mask = memory_mask(segment_ids, length, chunk_size)
        memory = make(chunks, w_base, mask)
        y, end = read_running(memory, mask)
        return y, _size(memory, end)
    check_parts(length, chunk_size)

    def on_part(chunks, w_base, segment_ids):
        size = length // sequence.num_parts()
        mask = part_mask(segment_ids, size, chunk_size)
        memory = make(chunks, w_base, mask)

        def step(state):
            y, end = read_running(memory, mask, state)
            return end, (y, _size(memory, end))

        if sequence.num_parts() == 1:
            return step(memory.start)[1]
        _, (y, size) = sequence.passed_along(step, memory.start)
        return y, jax.lax.psum(jnp.where(sequence.is_last(), size, 0), sequence.SEQ)

    names = ("batch", "length", None, None)
    run = rules.sharded(
        on_part,
        (
            (names,) * len(chunks),
            (None, None),
            None if segment_ids is None else ("batch", "length"),
        ),
        (names, ("batch",)),
    )
    return run(chunks, w_base, segment_ids)


def _size(memory: RunningMemory, end: Any) -> jax.Array:
    written = jax.lax.stop_gradient(memory.written(end)).astype(jnp.float32)
    return jnp.linalg.norm(written, axis=(-2, -1))
