"""Dual-window attention in XLA: dtypes, memory, rounding; the tiles that kernels visit. Its results
and gradients: `test_xla.py`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import draw, largest_array, traced
from ttcd_kernels import dual_window_attention_with_lse, window_attention
from ttcd_kernels.dual_window import xla
from ttcd_kernels.dual_window.tiles import documents, visits


def _inputs(B, T, S, N, K, H, dtype=None):
    """(q, k, v) and cotangents of the four results."""
    q, k, v = draw(0, (B, T, N, H), (B, S, K, H), (B, S, K, H), dtype=dtype)
    cotangents = draw(1, (B, T, N, H), (B, T, N, H), dtype=dtype)
    cotangents += draw(2, (B, T, N), (B, T, N), dtype=jnp.promote_types(q.dtype, jnp.float32))
    return (q, k, v), tuple(cotangents)


def _results_and_gradients(operands, cotangents, implementation="xla", **options):
    call = partial(dual_window_attention_with_lse, implementation=implementation, **options)
    results, pull = jax.vjp(call, *operands)
    return results, pull(cotangents)


def test_bfloat16_multiplies_narrow_operands_into_float32():
    narrow = _inputs(2, 40, 40, 4, 2, 16, dtype=jnp.bfloat16)
    run = partial(_results_and_gradients, teacher_window=16, student_window=4)
    results, gradients = jax.eval_shape(run, *narrow)
    assert [x.dtype for x in results] == [jnp.bfloat16] * 2 + [jnp.float32] * 2
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 3
    products = [eqn for eqn in traced(run, *narrow) if eqn.primitive.name == "dot_general"]
    # forward: scores and two bands of values; backward: scores, two for each band, dq, dk
    assert len(products) == 3 + 7
    for eqn in products:
        assert {x.aval.dtype for x in eqn.invars} == {jnp.dtype(jnp.bfloat16)}
        assert eqn.outvars[0].aval.dtype == jnp.float32


@pytest.mark.parametrize("window", [64, None])
def test_no_array_grows_with_the_square_of_the_length(window):
    T, N, H = 8192, 2, 8
    inputs = jax.eval_shape(partial(_inputs, 1, T, T, N, 1, H, jnp.float32))
    run = partial(_results_and_gradients, teacher_window=window, student_window=16)
    block = xla.block_rows(N, T, window or T)
    reach = (window or T) + block
    assert largest_array(traced(run, *inputs)) <= N * max(block * reach, 2 * (T + reach) * H)


def test_masks_of_all_queries_are_not_kept_for_the_backward():
    """In layers that are scanned and recomputed, though nothing with a gradient decides them."""
    T, N = 2048, 2
    (q, k, v), _ = jax.eval_shape(partial(_inputs, 1, T, T, N, 1, 8, jnp.float32))
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(q, k, v, ids):
        @jax.checkpoint
        def layer(q, _):
            out = window_attention(q, k, v, window=None, segment_ids=ids, implementation="xla")
            return out, None

        return jax.lax.scan(layer, q, None, length=3)[0].sum()

    block = xla.block_rows(N, T, T)
    largest = largest_array(traced(jax.grad(loss, argnums=(0, 1, 2)), q, k, v, ids))
    assert largest <= N * block * (T + block)


def test_narrow_gradients_of_sharp_weights_lose_no_more_than_their_rounding(float64):
    """The near band's dO is rounded: with the D of the unrounded one dq and dk are 8e-3 off."""
    operands, cotangents = _inputs(1, 256, 256, 2, 2, 64, jnp.bfloat16)
    operands = (3 * operands[0], 3 * operands[1], operands[2])
    cotangents = (*cotangents[:2], *(jnp.zeros_like(x) for x in cotangents[2:]))
    options = {"teacher_window": 128, "student_window": 64, "scale": 0.125}
    run = jax.jit(partial(_results_and_gradients, **options))
    wide = jax.tree.map(lambda x: x.astype(float), (operands, cotangents))
    for ours, exact in zip(run(operands, cotangents)[1][:2], run(*wide)[1][:2], strict=True):
        assert jnp.linalg.norm(ours.astype(float) - exact) < 6.6e-3 * jnp.linalg.norm(exact)


@pytest.mark.parametrize(("rows", "length"), [(0, 8), (2, 0)])
def test_nothing_gives_nothing(rows, length):
    operands, cotangents = _inputs(rows, length, 8, 4, 2, 16)
    found = _results_and_gradients(operands, cotangents, teacher_window=4, student_window=2)
    assert [x.shape for x in found[0]] == [x.shape for x in cotangents]
    assert [x.shape for x in found[1]] == [x.shape for x in operands]
    assert not any(x.any() for x in found[1])


BLOCK_Q, BLOCK_KV = 16, 8
LENGTHS = ((100, 100), (70, 101), (5, 60))
BANDS = ((0, 1), (0, 16), (16, 60), (7, 200), (20, 20))


def test_padding_behind_the_documents_of_a_row_hides_no_other_document():
    """It has id 0, as in packed rows."""
    ids = jnp.array([[1, 1, 2, 2, 3, 0, 0], [0, 0, 1, 1, 2, 2, 2], [1, 2, 0, 0, 1, 0, 0]])
    found = documents(ids)
    assert found.first_seen.tolist() == [[0, 0, 2, 2, 4, 5, 5], [0, 0, 2, 2, 4, 4, 4], [0] * 7]
    assert found.last_seeing.tolist() == [[1, 1, 3, 3, 4, 6, 6], [1, 1, 3, 3, 6, 6, 6], [6] * 7]


@pytest.mark.parametrize("length", [None, 1, 16, 37, "again"])
def test_tiles_cover_the_bands_exactly_and_inner_ones_hide_nothing(length):
    """With documents of some tiles, of one key, whose ids come again."""
    for T, S in LENGTHS:
        ids = np.arange(S) // 30 % 2 if length == "again" else np.arange(S) // (length or S)
        rows = None if length is None else documents(jnp.asarray(ids)[None])
        options = BANDS, T, S, BLOCK_Q, BLOCK_KV, rows
        by_query, by_key = (np.asarray(visits(*options, by_key=x))[0] for x in (False, True))
        assert (by_query.shape, by_key.shape) == (
            (-(-T // BLOCK_Q), len(BANDS), 4),
            (-(-S // BLOCK_KV), len(BANDS), 4),
        )
        for index, (low, high) in enumerate(BANDS):
            _check(ids, T, low, high, by_query[:, index], by_key[:, index])


def _check(ids, T, low, high, by_query, by_key):
    S, shape = len(ids), (len(by_query), len(by_key))
    row, key = np.arange(T)[:, None], np.arange(S)
    distance = row + S - T - key
    band = (low <= distance) & (distance < high)
    visible = band & (ids[S - T :, None] == ids)
    # Keys before the document of a tile's first query need no visit, nor queries after that of a
    # tile's last key, where ids never fall.
    first = row // BLOCK_Q * BLOCK_Q + S - T
    last = np.minimum(key // BLOCK_KV * BLOCK_KV + BLOCK_KV, S) - 1
    is_after = key >= np.searchsorted(ids, ids[first])
    is_before = row < np.searchsorted(ids, ids[last], "right") - (S - T)
    if (np.diff(ids) < 0).any():
        is_after = is_before = np.ones_like(band)

    def tiles(pairs, fill):
        """[query tiles, key tiles, pairs]."""
        padded = np.full((shape[0] * BLOCK_Q, shape[1] * BLOCK_KV), fill)
        padded[:T, :S] = pairs
        padded = padded.reshape(shape[0], BLOCK_Q, shape[1], BLOCK_KV)
        return padded.swapaxes(1, 2).reshape(*shape, -1)

    def visited(bounds, size):
        """(all, inner) [tiles, size]."""
        tile, bounds = np.arange(size), bounds[:, :, None]
        start, inner_start, inner_stop, stop = bounds.swapaxes(0, 1)
        return (start <= tile) & (tile < stop), (inner_start <= tile) & (tile < inner_stop)

    needed, hidden = tiles(visible, False).any(-1), tiles(~visible, False).any(-1)
    found, inner = visited(by_query, shape[1])
    np.testing.assert_array_equal(found & needed, needed)
    np.testing.assert_array_equal(found, tiles(band & is_after, False).any(-1))
    assert not (inner & hidden).any()
    # Rows after the last query are zeros for the tiles of keys; keys after the last do not exist.
    found_t, inner_t = (x.T for x in visited(by_key, shape[0]))
    np.testing.assert_array_equal(found_t & needed, needed)
    np.testing.assert_array_equal(found_t, tiles(band & is_before, False).any(-1))
    assert not (inner_t & hidden).any()
    if (np.diff(ids) >= 0).all():  # what is whole is inner, from both sides
        whole = tiles(visible, True).all(-1) & needed
        assert (inner_t >= whole).all()
        assert (inner | ~whole | ~tiles(visible, False).all(-1)).all()
