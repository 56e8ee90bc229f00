import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TWO_ROWS, assert_close, draw, largest_array, traced

from ttcd_jax.memory.chunks import chunk_segments, from_chunks, to_chunks
from ttcd_jax.memory.fast_swiglu import FastSwiGLU, FastWeights, FastWrites

B, T, L, N, H, F = 2, 14, 4, 2, 3, 5


class Tokens(NamedTuple):
    """Operands of reads and writes, per token."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rates: jax.Array
    momentum: jax.Array | None


def _start(seed=1) -> FastWeights:
    return FastWeights(*draw(seed, (N, H, F), (N, F, H), (N, H, F)))


def _tokens(seed=0, tokens=T, has_momentum=True) -> Tokens:
    """Not in chunks; rates and momenta are positive."""
    q, k, v, rates, votes = draw(seed, *[(B, tokens, N, H)] * 3, (B, tokens, N, 3), (B, tokens, N))
    return Tokens(q, k, v, jax.nn.softplus(rates), jax.nn.sigmoid(votes) if has_momentum else None)


def _run(start, tokens, ids=None, chunk_size=L, **options):
    size = tokens.q.shape[1]
    q, *writes = (None if x is None else to_chunks(x, chunk_size) for x in tokens)
    memory = FastSwiGLU(start, has_momentum=tokens.momentum is not None, **options)
    segments = None if ids is None else chunk_segments(ids, chunk_size)
    prepared = memory.prepared(q, FastWrites(*writes), segments, length=size)
    return from_chunks(memory.row(prepared, needs_end=False)[0], size)


def _f(weights, x):
    """One head: x [L, H]."""
    w0, w1, w2 = weights
    return (jax.nn.silu(x @ w0) * (x @ w2)) @ w1


def _descent(weights, k, v, rates):
    """Minus the gradient of -sum_t lr_t f(k_t) . v_t, every matrix at its own rate."""

    def objective(weights, rate):
        return jnp.sum(rate[:, None] * _f(weights, k) * v)

    gradients = [jax.grad(objective)(weights, rates[:, i]) for i in range(3)]
    return FastWeights(*(gradients[i][i] for i in range(3)))


def _one_document(keeps_raw, start, tokens, is_mine):
    """f(q) [C, L, H] of a row and head, its tokens in chunks, with those of one document alone."""

    def one_chunk(state, chunk):
        raw, used, before = state
        (q, k, v, rates, votes), mine = chunk
        mu = 0.0 if votes is None else jnp.where(mine, votes, 0).sum() / jnp.maximum(mine.sum(), 1)
        step = _descent(used, k, v, jnp.where(mine[:, None], rates, 0))
        step = jax.tree.map(lambda d, m: d + mu * m, step, before)
        raw = jax.tree.map(jnp.add, raw if keeps_raw else used, step)

        def rescaled(w, w_start):
            return w / (jnp.linalg.norm(w, axis=0) + 1e-5) * jnp.linalg.norm(w_start, axis=0)

        behind = (raw, jax.tree.map(rescaled, raw, start), step)
        return jax.tree.map(lambda x, y: jnp.where(mine.any(), x, y), behind, state), _f(used, q)

    state = (start, start, jax.tree.map(jnp.zeros_like, start))
    return jax.lax.scan(one_chunk, state, (tuple(tokens), is_mine))[1]


def _definition(keeps_raw, start, tokens, ids):
    """[B, T, N, H], every document from the start; `ids` are numpy's."""
    chunks = jax.tree.map(lambda x: to_chunks(x, L), tokens)
    rows, documents = np.array([(b, i) for b in range(B) for i in set(ids[b].tolist())]).T
    is_mine = np.pad(ids[rows] == documents[:, None], ((0, 0), (0, -T % L)))
    is_mine = is_mine.reshape(-1, T // L + 1, L)
    heads = jax.vmap(functools.partial(_one_document, keeps_raw), (0, 2, None), 2)
    each = jax.vmap(heads, (None, 0, 0))(start, jax.tree.map(lambda x: x[rows], chunks), is_mine)
    own = jnp.where(is_mine[..., None, None], each, 0)
    return from_chunks(jnp.zeros(chunks.q.shape).at[rows].add(own), T)


def _with_gradients(run, start, tokens):
    weight = jnp.cos(jnp.arange(B * T * N * H)).reshape(B, T, N, H)

    @jax.jit
    def evaluate(start, tokens):
        y, pull = jax.vjp(run, start, tokens)
        return y, pull(weight)

    return evaluate(start, tokens)


@pytest.mark.parametrize(("keeps_raw", "has_momentum"), [(False, True), (True, False)])
def test_every_document_learns_alone_by_the_definition(keeps_raw, has_momentum, float64):
    """Values and gradients; the definition differentiates f where the memory has formulas."""
    options, start = {"keeps_raw": keeps_raw, "state_dtype": jnp.float64}, _start()
    tokens, ids = _tokens(has_momentum=has_momentum), jnp.asarray(TWO_ROWS)
    ours = _with_gradients(lambda s, t: _run(s, t, ids, **options), start, tokens)
    theirs = _with_gradients(lambda s, t: _definition(keeps_raw, s, t, TWO_ROWS), start, tokens)
    assert_close(ours, theirs, 1e-9)
    one = _definition(keeps_raw, start, tokens, np.zeros_like(TWO_ROWS))
    assert_close(_run(start, tokens, **options), one, 1e-9)


def test_the_backward_keeps_states_and_no_activations():
    """Activations of the whole row [B, T, N, F] never exist: per chunk three matrices are kept."""
    hidden, tokens, size = 64, 32, 8
    start = FastWeights(*draw(0, (1, H, hidden), (1, hidden, H), (1, H, hidden)))
    shapes = [(1, tokens, 1, H)] * 3 + [(1, tokens, 1, 3), (1, tokens, 1)]
    inputs = Tokens(*draw(1, *shapes))
    run = jax.grad(lambda s, t: _run(s, t, chunk_size=size).sum(), argnums=(0, 1))
    states = (tokens // size) * H * hidden
    assert largest_array(traced(run, start, inputs)) <= states < tokens * hidden
