"""The (gated) delta rule: a state whose value for a key is replaced, not added to.

Per head, with state S [H, X], decay exp(g_t) (1 without a gate) and strength beta_t:

    S <- exp(g_t) S,   u_t = beta_t (v_t - S^T k_t),   S <- S + k_t u_t^T,   o_t = S^T q_t / sqrt(H)

(Yang et al., "Parallelizing linear transformers with the delta rule", and "Gated delta networks").
`DeltaMemory` computes this in chunks of L tokens: with D_ij = exp(g_{j+1} + .. + g_i), the share of
token j's write that is left at i (j = 0: of the state S_0 before the chunk), a chunk's writes solve
a unit lower triangular system,

    (I + A) U = beta V - (beta D_i0 K) S_0,   A_ij = beta_i D_ij (k_i . k_j) for j < i,

so all chunks are solved at once for both right sides, and only products with S_0 are sequential.
Documents need no masks: the first token of a document forgets everything. The state before a row
is that of its first document, the one after it that of its last.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ttcd_jax.memory.chunks import from_chunks, to_chunks
from ttcd_jax.memory.protocol import ROWS, AssociativeMemory, Axes, Summary
from ttcd_jax.nn.linear import product

NORM_EPS = 1e-6
State = Float[Array, "B N H X"]
# g of a token that forgets everything: exp is 0, sums over a chunk stay finite in float32.
FORGET_ALL = -1e30


def l2_normalize_inside(x: Float[Array, "... X"]) -> Float[Array, "... X"]:
    """x / sqrt(|x|^2 + 1e-6) over the last axis: smooth at zero, where
    `ttcd_kernels.normalize.l2_normalize` is not. Statistics in float32 or better."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + NORM_EPS)
    return (wide * scale).astype(x.dtype)


class DeltaWrites(NamedTuple):
    """Operands of the write, per token."""

    k: Float[Array, "B T N H"]
    v: Float[Array, "B T N X"]
    beta: Float[Array, "B T N"]
    log_decay: Float[Array, "B T N"] | None  # g <= 0, finite


class _Chunk(NamedTuple):
    """A chunk as a function of the state S before it, [C, B, N, ...]: u = writes - erases S,
    o = queries S + scores u, and S <- kept S + keys^T u. The factors include the decay."""

    queries: jax.Array  # [L, H], operands of products in the dtype of the inputs
    scores: jax.Array  # [L, S], zero for later S
    keys: jax.Array  # [L, H]
    erases: jax.Array  # [L, H]
    writes: jax.Array  # [L, X], wide
    kept: jax.Array  # [1, 1], wide


Solved = tuple[_Chunk, int]  # the chunks of a row, and its tokens


@struct.dataclass
class DeltaMemory(AssociativeMemory[DeltaWrites, State, Solved]):
    """The delta rule as a memory: its state is S [B, N, H, X], read by q [B, T, N, H], written by
    `DeltaWrites`; a token reads its own write. `chunk_size` changes the speed, not the result.

    Products take operands in the dtype of v and accumulate in float32 or better, as gates and the
    triangular solve do. The backward keeps one state per chunk and recomputes the rest.
    """

    chunk_size: int = struct.field(pytree_node=False)
    state_dtype: DTypeLike = struct.field(pytree_node=False)

    def axes(self) -> Axes:
        heads = (*ROWS, "heads")
        return Axes((), heads, heads, heads)

    def prepared(
        self,
        reads: Float[Array, "B T N H"],
        writes: DeltaWrites,
        segments: Int[Array, "B T"] | None,
        *,
        length: int,
        previous_segment: Int[Array, " B"] | None = None,
    ) -> Solved:
        wide = jnp.promote_types(self.state_dtype, jnp.float32)
        log_decay = _forgetting(writes.log_decay, segments, previous_segment, wide)
        writes = writes._replace(log_decay=log_decay)
        size = min(self.chunk_size, length)

        def arrange(x: jax.Array) -> jax.Array:  # [B, T, N, ...] -> [C, B, N, L, ...]
            return jnp.moveaxis(to_chunks(x, size), (1, 3), (0, 2))

        # Padding has beta = 0 and g = 0: it writes and forgets nothing.
        solve = jax.checkpoint(functools.partial(_solve, wide=wide))
        return solve(*jax.tree.map(arrange, (reads, writes))), length

    def start_of(self, prepared: Solved) -> State:
        chunks, _ = prepared
        shape = (*chunks.keys.shape[1:3], chunks.keys.shape[-1], chunks.writes.shape[-1])
        return jnp.zeros(shape, self.state_dtype)

    def row(
        self, prepared: Solved, state: State | None = None, *, needs_end: bool = True
    ) -> tuple[Float[Array, "B T N X"], State]:
        state, (chunks, length) = self.start_of(prepared) if state is None else state, prepared
        state, o = jax.lax.scan(jax.checkpoint(_advance, prevent_cse=False), state, chunks)
        return from_chunks(jnp.moveaxis(o, (0, 2), (1, 3)), length), state

    def summary(self, prepared: Solved) -> Summary:
        """The map of all chunks together: `added` is the result for a zero state, `kept` [B, N, H,
        H] for the identity without writes."""
        zero = self.start_of(prepared)
        kept = jnp.zeros((*zero.shape[:-1], zero.shape[-2]), zero.dtype)

        def compose(before: Summary, chunk: _Chunk) -> tuple[Summary, None]:
            homogeneous = chunk._replace(writes=jnp.zeros((), chunk.writes.dtype))
            return Summary(_after(before.kept, homogeneous), _after(before.added, chunk)), None

        composed = jax.checkpoint(compose, prevent_cse=False)
        return jax.lax.scan(composed, self.neutral(Summary(kept, zero)), prepared[0])[0]

    def combine(self, first: Summary, then: Summary) -> Summary:
        apply = functools.partial(jnp.einsum, "BNHK,BNKX->BNHX", then.kept, precision="highest")
        return Summary(apply(first.kept), apply(first.added) + then.added)

    def neutral(self, summary: Summary) -> Summary:
        kept, added = summary
        identity = jnp.broadcast_to(jnp.eye(kept.shape[-1], dtype=kept.dtype), kept.shape)
        return Summary(identity, jnp.zeros_like(added))


def _forgetting(
    log_decay: jax.Array | None,
    segment_ids: jax.Array | None,
    previous_segment: jax.Array | None,
    dtype: DTypeLike,
) -> jax.Array | None:
    """g [B, T, N or 1], `FORGET_ALL` where any document but the row's first begins; None: 0."""
    log_decay = None if log_decay is None else log_decay.astype(dtype)
    if segment_ids is None:
        return log_decay
    first = segment_ids[:, 0] if previous_segment is None else previous_segment
    before = jnp.concatenate([first[:, None], segment_ids[:, :-1]], axis=1)
    begins = (segment_ids != before)[..., None]
    decay_inside = jnp.zeros((), dtype) if log_decay is None else log_decay
    return jnp.where(begins, jnp.asarray(FORGET_ALL, dtype), decay_inside)


def _solve(q: jax.Array, operands: DeltaWrites, *, wide: DTypeLike) -> _Chunk:
    """All chunks at once, from arrays [C, B, N, L, ...]."""
    k, v, beta, log_decay = operands
    narrow, scale = v.dtype, q.shape[-1] ** -0.5
    of_writes, of_state = _decays(log_decay, q.shape[-2], wide)
    of_state = jnp.broadcast_to(of_state, beta.shape)[..., None]
    beta = beta.astype(wide)[..., None]
    overlap = beta * of_writes * product("CBNLH,CBNSH->CBNLS", k, k, wide)
    sides = jnp.concatenate([beta * v, beta * of_state * k], axis=-1).astype(wide)
    solved = unit_lower_solve(overlap, sides)
    writes, erases = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = scale * of_writes * product("CBNLH,CBNSH->CBNLS", q, k, wide)
    return _Chunk(
        queries=(scale * of_state * q).astype(narrow),
        scores=scores.astype(narrow),
        keys=(of_writes[..., -1, :, None] * k).astype(narrow),
        erases=erases.astype(narrow),
        writes=writes,
        kept=of_state[..., -1:, :],
    )


@jax.custom_vjp
def unit_lower_solve(a: jax.Array, b: jax.Array) -> jax.Array:
    """X of (I + A) X = B for the strictly lower triangle A of `a` [.., L, L] and B [.., L, Z]."""
    return _full_product(_unit_lower_inverse(a), b)


def _solve_forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _unit_lower_inverse(a)
    x = _full_product(inverse, b)
    return x, (inverse, x)


def _solve_backward(
    saved: tuple[jax.Array, jax.Array], d_x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    inverse, x = saved
    d_b = _full_product(inverse.mT, d_x)
    return -jnp.tril(_full_product(d_b, x.mT), k=-1), d_b


unit_lower_solve.defvjp(_solve_forward, _solve_backward)


# At full precision, also where a GPU would round float32 to TF32.
_full_product = functools.partial(jnp.matmul, precision="highest")


def _unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + A)^-1, by doubling: the inverses X, Y of two neighboring diagonal blocks give that of
    both, [[X, 0], [-Y C X, Y]], C the block of A below X. All blocks of a size at once: products
    only, L^3 / 3 multiply-adds, as exact as forward substitution. (The short product of powers (I
    - A)(I + A^2).. loses all digits where keys repeat.)"""
    size = a.shape[-1]
    padding = [(0, 0)] * (a.ndim - 2) + [(0, (1 << (size - 1).bit_length()) - size)] * 2
    a = jnp.pad(a, padding)
    blocks = jnp.ones((*a.shape[:-1], 1, 1), a.dtype)  # [.., number of blocks, s, s]
    while blocks.shape[-1] < a.shape[-1]:
        s = blocks.shape[-1]
        pairs = a.shape[-1] // (2 * s)
        below = a.reshape(*a.shape[:-2], pairs, 2, s, pairs, 2, s)[..., 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(below, axis1=-4, axis2=-2), -1, -3)
        left, right = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corner = -_full_product(right, _full_product(below, left))
        upper = jnp.concatenate([left, jnp.zeros_like(left)], axis=-1)
        blocks = jnp.concatenate([upper, jnp.concatenate([corner, right], axis=-1)], axis=-2)
    return blocks[..., 0, :size, :size]


def _decays(
    log_decay: jax.Array | None, size: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """(share of the write at S that is left at L, zero for later S [.., L, S]; share of the state
    before the chunk that is left at L [.., L])."""
    is_past = jnp.tri(size, dtype=bool)
    if log_decay is None:
        return is_past.astype(dtype), jnp.ones((size,), dtype)
    # Sums of the log decays in between, not differences of prefix sums: those lose precision
    # after a strong decay. No sum exceeds 0, so no exp overflows. The product with ones takes a
    # fraction of the time of a cumsum.
    later = jnp.where(jnp.tri(size, k=-1, dtype=bool), log_decay[..., None], 0)
    between = jnp.einsum("LZ,...ZS->...LS", is_past.astype(dtype), later, precision="highest")
    return jnp.where(is_past, jnp.exp(between), 0), jnp.exp(jnp.cumsum(log_decay, axis=-1))


def _advance(state: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    """(state after the chunk, o [B, N, L, X])."""
    narrow, wide = chunk.scores.dtype, chunk.writes.dtype
    u = _written(state, chunk)
    o = product("BNLH,BNHX->BNLX", chunk.queries, state.astype(narrow), wide)
    o = o + product("BNLS,BNSX->BNLX", chunk.scores, u, wide)
    return _after(state, chunk, u), o.astype(narrow)


def _written(state: jax.Array, chunk: _Chunk) -> jax.Array:
    """u [B, N, L, X]."""
    narrow, wide = chunk.scores.dtype, chunk.writes.dtype
    erased = product("BNLH,BNHX->BNLX", chunk.erases, state.astype(narrow), wide)
    return (chunk.writes - erased).astype(narrow)


def _after(state: jax.Array, chunk: _Chunk, u: jax.Array | None = None) -> jax.Array:
    u = _written(state, chunk) if u is None else u
    added = product("BNLH,BNLX->BNHX", chunk.keys, u, chunk.writes.dtype)
    return (chunk.kept * state + added).astype(state.dtype)
