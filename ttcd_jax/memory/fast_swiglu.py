"""LaCT's memory: a SwiGLU whose three matrices learn along the row, chunk by chunk.

Every chunk is read first, through what the chunks before it wrote, and written then; the last one
is only read. Per fast head, with rows q, k, v [L, H], learning rates lr per token and matrices in
[in, out] layout (the published ones transposed):

    read    f(q) = (silu(q w0) * (q w2)) w1
    write   a = k w0,  u = k w2,  g = v w1^T,  all from the weights the chunk was read through
            dw0 = k^T (lr0 g u silu'(a)),  dw1 = (lr1 silu(a) u)^T v,  dw2 = k^T (lr2 g silu(a))
            dw <- dw + mu dw_previous,  then Newton-Schulz for this step only (both optional)
            w <- (w + dw) |start| / (|w + dw| + 1e-5),  column by column

dw is minus the gradient of -sum_t lr_t f(k_t) . v_t, summed over the chunk. Gradients flow through
the whole chain of updates, the column norms and the start. One step per chunk, recomputed in the
backward: it keeps one set of matrices per chunk and the activations of one chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ttcd_jax.memory.chunks import ChunkedMemory, MemoryMask
from ttcd_jax.memory.newton_schulz import newton_schulz
from ttcd_jax.nn.product import product

UNIT_EPS = 1e-5


class FastWeights(NamedTuple):
    """The matrices of f; a leading batch axis while they learn."""

    w0: Float[Array, "*B N H F"]
    w1: Float[Array, "*B N F H"]
    w2: Float[Array, "*B N H F"]


class FastRule(NamedTuple):
    """Static facts of the memory."""

    orthogonalizes: bool = False  # Newton-Schulz on every step
    keeps_raw: bool = False  # steps add to weights that are never normalised; only reads are
    state_dtype: DTypeLike = jnp.float32


class FastInputs(NamedTuple):
    """What tokens bring to the memory, in chunks."""

    q: Float[Array, "B C L N H"]
    k: Float[Array, "B C L N H"]
    v: Float[Array, "B C L N H"]
    rates: Float[Array, "B C L N 3"]  # of w0, w1, w2
    momentum: Float[Array, "B C L N"] | None  # mu is its mean over a chunk; None: no momentum


class _Chunk(NamedTuple):
    """One chunk of `FastInputs` with its mask, heads before tokens."""

    q: Float[Array, "B N L H"]
    k: Float[Array, "B N L H"]
    v: Float[Array, "B N L H"]
    rates: Float[Array, "B N L 3"]
    momentum: Float[Array, "B N L"] | None
    writes: Bool[Array, "#B L"] | None
    reads: Bool[Array, "B L"] | None
    resets: Bool[Array, " B"] | None


class FastState(NamedTuple):
    """The memory between two chunks."""

    weights: FastWeights  # what chunks use
    raw: FastWeights | None  # the same, never normalised (`keeps_raw`)
    previous: FastWeights | None  # the last step with its momentum, before Newton-Schulz


def length(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """|x| over `axis`, which stays with size 1; its derivative at a zero vector is taken as 0."""
    square = jnp.sum(x * x, axis=axis, keepdims=True)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)


def unit(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """x / (|x| + 1e-5) over `axis`."""
    return x / (length(x, axis) + UNIT_EPS)


def fast_swiglu(
    rule: FastRule, start: FastWeights, inputs: FastInputs, mask: MemoryMask
) -> Float[Array, "B C L N H"]:
    """f(q) of every token through the memory of the chunks before its own, in q's dtype.

    In a row of one chunk, whole or not, nothing is written. Documents: only a chunk's last document
    writes; a token whose document did not write the memory in front of its chunk reads `start`;
    where the last document is a new one, the weights return to `start` (and the momentum to zero)
    before it writes.
    """
    begin = fresh_state(rule, start, inputs)
    earlier = jax.tree.map(lambda x: x[:, :-1], (inputs, mask))
    state, y = continued_swiglu(rule, start, earlier[0], earlier[1], begin)
    chunk = jax.tree.map(lambda x: x[-1], _chunks_first(inputs, mask))
    y_last = _read(rule, begin, state, chunk).transpose(0, 2, 1, 3)
    return jnp.concatenate([y, y_last[:, None]], axis=1)


def continued_swiglu(
    rule: FastRule, start: FastWeights, inputs: FastInputs, mask: MemoryMask, state: FastState
) -> tuple[FastState, Float[Array, "B C L N H"]]:
    """(the memory behind the row, f(q)) of a row that finds `state` in front of it and whose every
    chunk is written, the last one too."""
    begin = fresh_state(rule, start, inputs)
    sizes = _column_norms(begin.weights)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(state: FastState, chunk: _Chunk):
        return _write(rule, begin, sizes, state, chunk), _read(rule, begin, state, chunk)

    state, y = jax.lax.scan(one_chunk, state, _chunks_first(inputs, mask))
    return state, y.transpose(1, 0, 3, 2, 4)


def chunked_memory(rule: FastRule, start: FastWeights) -> ChunkedMemory:
    """The same memory, a chunk at a time: read by q [B, T, N, H], written by the `FastInputs` of a
    chunk. Its state is a `FastState`."""

    def alone(inputs: FastInputs) -> _Chunk:
        heads_first = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 1), inputs)
        return _Chunk(*heads_first, writes=None, reads=None, resets=None)

    def read(state: FastState, q):
        return _apply(rule, state.weights, q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    def write(state: FastState, inputs: FastInputs):
        sizes = _column_norms(jax.tree.map(lambda w: w[None].astype(rule.state_dtype), start))
        return _write(rule, state, sizes, state, alone(inputs))

    return ChunkedMemory(read, write)


def _column_norms(weights: FastWeights) -> FastWeights:
    """What the columns of a state's weights are held at, from weights of any batch."""
    return jax.tree.map(lambda w: length(w[0], -2), weights)


def fresh_state(rule: FastRule, start: FastWeights, inputs: FastInputs) -> FastState:
    """The memory in front of a document, for every row of `inputs`."""
    batch = inputs.q.shape[0]
    weights = jax.tree.map(
        lambda w: jnp.broadcast_to(w.astype(rule.state_dtype), (batch, *w.shape)), start
    )
    return FastState(
        weights,
        weights if rule.keeps_raw else None,
        None if inputs.momentum is None else jax.tree.map(jnp.zeros_like, weights),
    )


def _chunks_first(inputs: FastInputs, mask: MemoryMask) -> _Chunk:
    """[C, B, N, L, ...], in one copy: the order of the scan and of the batched products."""
    heads_first = jax.tree.map(lambda x: jnp.moveaxis(jnp.moveaxis(x, 3, 1), 2, 0), inputs)
    return _Chunk(*heads_first, *jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), mask))


def _read(rule: FastRule, begin: FastState, state: FastState, chunk: _Chunk) -> jax.Array:
    """f(q) [B, N, L, H] of one chunk."""
    y = _apply(rule, state.weights, chunk.q)
    if chunk.reads is None:
        return y
    return jnp.where(chunk.reads[:, None, :, None], y, _apply(rule, begin.weights, chunk.q))


def _apply(rule: FastRule, weights: FastWeights, q: jax.Array) -> jax.Array:
    w0, w1, w2 = (w.astype(q.dtype) for w in weights)
    gate = product("BNLH,BNHF->BNLF", q, w0, rule.state_dtype)
    up = product("BNLH,BNHF->BNLF", q, w2, rule.state_dtype)
    hidden = (jax.nn.silu(gate) * up).astype(q.dtype)
    return product("BNLF,BNFH->BNLH", hidden, w1, rule.state_dtype).astype(q.dtype)


def _write(
    rule: FastRule, begin: FastState, sizes: FastWeights, state: FastState, chunk: _Chunk
) -> FastState:
    """The state behind one chunk; `sizes` are the column norms of the start."""
    if chunk.resets is not None:
        is_new = chunk.resets[:, None, None, None]
        state = jax.tree.map(lambda first, now: jnp.where(is_new, first, now), begin, state)
    step = _step(rule, state.weights, chunk)
    if chunk.momentum is not None:
        # Only a chunk of a single document has a step before it: its tokens all have a vote.
        mu = chunk.momentum.mean(-1)[:, :, None, None]
        step = jax.tree.map(lambda dw, before: dw + mu * before, step, state.previous)
    previous = None if chunk.momentum is None else step
    if rule.orthogonalizes:
        step = jax.tree.map(newton_schulz, step)
    raw = jax.tree.map(jnp.add, state.weights if state.raw is None else state.raw, step)
    weights = jax.tree.map(lambda w, size: unit(w, -2) * size, raw, sizes)
    return FastState(weights, raw if rule.keeps_raw else None, previous)


def _step(rule: FastRule, weights: FastWeights, chunk: _Chunk) -> FastWeights:
    """dw of one chunk, before momentum."""
    k, v, dtype = chunk.k, chunk.v, rule.state_dtype
    w0, w1, w2 = (w.astype(k.dtype) for w in weights)
    gate = product("BNLH,BNHF->BNLF", k, w0, dtype)
    up = product("BNLH,BNHF->BNLF", k, w2, dtype)
    back = product("BNLH,BNFH->BNLF", v, w1, dtype)
    rates = chunk.rates.astype(dtype)
    if chunk.writes is not None:
        rates = jnp.where(chunk.writes[:, None, :, None], rates, 0)
    lr0, lr1, lr2 = (rates[..., i, None] for i in range(3))
    share = jax.nn.sigmoid(gate)
    active = gate * share
    slope = share + active * (1 - share)  # silu'(gate)
    d_gate = (lr0 * back * up * slope).astype(k.dtype)
    hidden = (lr1 * active * up).astype(k.dtype)
    d_up = (lr2 * back * active).astype(k.dtype)
    return FastWeights(
        w0=product("BNLH,BNLF->BNHF", k, d_gate, dtype),
        w1=product("BNLF,BNLH->BNFH", hidden, v, dtype),
        w2=product("BNLH,BNLF->BNHF", k, d_up, dtype),
    )
