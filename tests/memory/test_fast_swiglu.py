"""LaCT's memory. What one document learns is compared with the reference, with all gradients, in
tests/parity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TWO_ROWS, assert_close, draw, largest_array, traced, with_gradients

from ttcd_jax.memory.chunks import chunk_segments, from_chunks, to_chunks
from ttcd_jax.memory.fast_swiglu import FastSwiGLU, FastWeights, FastWrites

B, T, L, N, H, F = 2, 14, 4, 2, 3, 5


def _start(seed=1) -> FastWeights:
    return FastWeights(*draw(seed, (N, H, F), (N, F, H), (N, H, F)))


def _tokens(has_momentum):
    """(q, writes), not in chunks; rates and momenta are positive."""
    q, k, v, rates, votes = draw(0, *[(B, T, N, H)] * 3, (B, T, N, 3), (B, T, N))
    momentum = jax.nn.sigmoid(votes) if has_momentum else None
    return q, FastWrites(k, v, jax.nn.softplus(rates), momentum)


def _run(start, tokens, ids=None, chunk_size=L, **options):
    size = tokens[0].shape[1]
    q, writes = jax.tree.map(lambda x: to_chunks(x, chunk_size), tokens)
    memory = FastSwiGLU(start, has_momentum=writes.momentum is not None, **options)
    prepared = memory.prepared(q, writes, chunk_segments(ids, chunk_size), length=size)
    return from_chunks(memory.row(prepared, needs_end=False)[0], size)


def _alone(start, tokens, ids, **options):
    """Every document by a run over its own chunks, in which nothing else writes."""
    y = jnp.zeros(tokens[0].shape)
    for row, document in [(b, x) for b in range(B) for x in np.unique(ids[b])]:
        (places,) = np.nonzero(ids[row] == document)
        cut = np.s_[row : row + 1, places[0] // L * L : places[-1] + 1]
        is_mine = (ids[cut] == document)[..., None, None]
        q, writes = jax.tree.map(lambda x, cut=cut: x[cut], tokens)
        own = q, writes._replace(rates=jnp.where(is_mine, writes.rates, 0))
        y = y.at[cut].add(jnp.where(is_mine, _run(start, own, **options), 0))
    return y


@pytest.mark.parametrize(("keeps_raw", "has_momentum"), [(False, True), (True, False)])
def test_every_document_learns_alone(keeps_raw, has_momentum, float64):
    options = {"keeps_raw": keeps_raw, "state_dtype": jnp.float64}
    start, tokens = _start(), _tokens(has_momentum)
    ids = jnp.asarray(TWO_ROWS)
    ours = with_gradients(lambda s, t: _run(s, t, ids, **options), start, tokens)
    theirs = with_gradients(lambda s, t: _alone(s, t, TWO_ROWS, **options), start, tokens)
    assert_close(ours, theirs, 1e-9)


def test_the_backward_keeps_states_and_no_activations():
    """Activations of the whole row [B, T, N, F] never exist: per chunk three matrices are kept."""
    hidden, tokens, size = 64, 32, 8
    start = FastWeights(*draw(0, (1, H, hidden), (1, hidden, H), (1, H, hidden)))
    shapes = [(1, tokens, 1, H)] * 3 + [(1, tokens, 1, 3), (1, tokens, 1)]
    q, *writes = draw(1, *shapes)
    run = jax.grad(lambda s, t: _run(s, t, chunk_size=size).sum(), argnums=(0, 1))
    states = (tokens // size) * H * hidden
    assert largest_array(traced(run, start, (q, FastWrites(*writes)))) <= states < tokens * hidden
