"""Memories that are no prefix sum: what a chunk writes, or how it is kept, depends on the running
weight. One step per chunk, recomputed in the backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from ttcd_kernels.normalize import NORM_EPS

from ttcd_jax.memory.chunks import ChunkedMemory, MemoryMask, masked
from ttcd_jax.memory.delta import chunk_delta
from ttcd_jax.memory.prefix import MemoryRule
from ttcd_jax.nn.product import product


class RunningRule(NamedTuple):
    """How a running weight is written and read. State leaves carry the batch axis first."""

    write: Callable[[Any, Any], Any]  # (state, operands of a chunk [B, ...]) -> state
    weight: Callable[[Any], jax.Array]  # W [B, F, D] of a state
    start: Callable[[int], Any]  # the state in front of a document, for a batch size
    w_base: Float[Array, "F D"]
    eta: float


class RunningMemory(NamedTuple):
    """A memory as a loop over the chunks of a row."""

    rule: RunningRule
    operands: Any  # of the writes, [B, C, ...]
    z: Float[Array, "B C L F"]  # what is read through W

    @property
    def start(self) -> Any:
        """The state in front of a document."""
        return self.rule.start(self.z.shape[0])

    def written(self, end: Any) -> Float[Array, "B F D"]:
        """(W - W_base) / eta of a state."""
        weight = self.rule.weight(end)
        return (weight - self.rule.w_base.astype(weight.dtype)) / (self.rule.eta or 1.0)


def ideal_memory(
    z_teacher: Float[Array, "B C L F"],
    z_student: Float[Array, "B C L F"],
    w_base: Float[Array, "F D"],
    mask: MemoryMask,
    *,
    eta: float,
    state_dtype: DTypeLike,
) -> RunningMemory:
    """Gradient descent on the distillation loss, one step per chunk: `ideal_rule` on a row. The
    mean over a chunk is over the tokens that write: those of its last document."""
    writes = jnp.ones(z_student.shape[:3], bool) if mask.writes is None else mask.writes
    operands = (z_teacher, z_student, jnp.broadcast_to(writes, z_student.shape[:3]))
    rule = ideal_rule(w_base, eta=eta, state_dtype=state_dtype)
    return RunningMemory(rule, operands, z_teacher)


def ideal_rule(w_base: Float[Array, "F D"], *, eta: float, state_dtype: DTypeLike) -> RunningRule:
    """The paper's eq. inplace_update_sw, in [F, D] layout. With L_CD(W), the mean over a chunk of
    |stopgrad(z_teacher W_i) - z_student W|^2 / 2, chunk i is read through W_i and writes

        W_{i+1} = W_i - eta dL_CD/dW at W_i
                = W_i + eta * mean over the chunk of z_student^T (z_teacher W_i - z_student W_i).

    The error is taken against the running weight, so updates depend on one another and no prefix
    sum gives them. No gradient flows through the teacher's term; all else is differentiable. A
    chunk's operands are (z_teacher, z_student, which tokens write).
    """

    def write(weight, chunk):
        z_teacher, z_student, writes = chunk
        narrow = weight.astype(z_student.dtype)
        target = jax.lax.stop_gradient(product("BLF,BFD->BLD", z_teacher, narrow, state_dtype))
        error = target - product("BLF,BFD->BLD", z_student, narrow, state_dtype)
        error = masked(error[:, None], writes[:, None])[:, 0]
        delta = product("BLF,BLD->BFD", z_student, error.astype(z_student.dtype), state_dtype)
        return weight + eta * delta / writes.sum(-1).astype(state_dtype)[:, None, None]

    def start(batch_size: int):
        base = w_base.astype(state_dtype)
        return jnp.broadcast_to(base, (batch_size, *base.shape))

    return RunningRule(write, lambda weight: weight, start, w_base, eta)


def renormalized_memory(
    rule: MemoryRule,
    z: Float[Array, "B C L F"],
    keys: Float[Array, "B C L F"],
    errors: Float[Array, "B C L D"],
    w_base: Float[Array, "F D"],
    mask: MemoryMask,
    group_chunks: int,
) -> RunningMemory:
    """`renormalized_rule` on a row."""
    operands = (keys, masked(errors, mask.writes))
    return RunningMemory(renormalized_rule(rule, w_base, group_chunks), operands, z)


def renormalized_rule(
    rule: MemoryRule, w_base: Float[Array, "F D"], group_chunks: int
) -> RunningRule:
    """The memory whose Frobenius norm is held at that of W_base.

    Inside a group of `group_chunks` chunks W_i = R(B_g + eta * sum_{j<i in group} delta_w_j), and
    the group ends with B_{g+1} = R(the same with all its chunks); R(M) = M |W_base|_F / max(|M|_F,
    1e-6). Groups are counted from the first chunk a document can write into. A chunk's operands are
    (keys, errors).
    """
    base = w_base.astype(rule.state_dtype)
    norm = jnp.linalg.norm(base)

    def weight(state):
        group_start, total, _ = state
        matrix = group_start + rule.eta * total
        size = jnp.linalg.norm(matrix, axis=(-2, -1), keepdims=True)
        return matrix * (norm / jnp.maximum(size, NORM_EPS))

    def write(state, chunk):
        group_start, total, count = state
        keys, errors = (x[:, None] for x in chunk)
        delta = chunk_delta(
            errors, keys, orthogonalizes=rule.orthogonalizes, dtype=rule.state_dtype
        )
        total, count = total + delta[:, 0], count + 1
        is_group_end = (count % group_chunks == 0)[:, None, None]
        group_start = jnp.where(is_group_end, weight((group_start, total, count)), group_start)
        return group_start, jnp.where(is_group_end, 0, total), count

    def start(batch_size: int):
        group_start = jnp.broadcast_to(base, (batch_size, *base.shape))
        return group_start, jnp.zeros_like(group_start), jnp.zeros(batch_size, jnp.int32)

    return RunningRule(write, weight, start, w_base, rule.eta)


def read_running(
    memory: RunningMemory, mask: MemoryMask, state: Any = None
) -> tuple[Float[Array, "B C L D"], Any]:
    """(y, the state behind the row): chunk after chunk, z is read through W, then the chunk is
    written. Tokens that may not read the state read W_base. `state`: what stands in front of the
    row, default `memory.start`."""

    rule = memory.rule

    def one_chunk(state, chunk):
        z, reads, resets, operands = chunk
        y = _read(rule, state, z)
        if reads is not None:
            base = product("BLF,FD->BLD", z, rule.w_base, y.dtype)
            y = jnp.where(reads[..., None], y, base)
        if resets is not None:
            state = jax.tree.map(
                lambda new, old: jnp.where(resets.reshape(-1, *[1] * (old.ndim - 1)), new, old),
                rule.start(z.shape[0]),
                state,
            )
        return rule.write(state, operands), y.astype(z.dtype)

    rows = (memory.z, mask.reads, mask.resets, memory.operands)
    chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), rows)
    start = memory.start if state is None else state
    end, y = jax.lax.scan(jax.checkpoint(one_chunk), start, chunks)
    return jnp.moveaxis(y, 0, 1), end


def _read(rule: RunningRule, state: Any, z: Float[Array, "B L F"]) -> Float[Array, "B L D"]:
    """z W, in the dtype of W."""
    matrix = rule.weight(state)
    return product("BLF,BFD->BLD", z, matrix.astype(z.dtype), matrix.dtype)


def chunked_memory(rule: RunningRule) -> ChunkedMemory:
    """The same memory, a chunk at a time: read by features z [B, T, F], written by a chunk's
    operands."""

    def read(state, z):
        return _read(rule, state, z).astype(z.dtype)

    return ChunkedMemory(read, rule.write)
