from functools import partial
from pathlib import Path

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw, largest_array, temporary_bytes, traced
from ttcd_kernels import dual_window_attention_with_lse, window_attention
from ttcd_kernels.dispatch import Candidate
from ttcd_kernels.dual_window import api, xla
from ttcd_kernels.windows import Windows

from tests.parity.checks import check_attention
from tests.parity.golden import Golden

GOLDEN = Path(__file__).parent.parent / "golden"


def _inputs(B, T, S, N, K, H, dtype=None):
    """(q, k, v) and cotangents of the four results."""
    q, k, v = draw(0, (B, T, N, H), (B, S, K, H), (B, S, K, H), dtype=dtype)
    cotangents = draw(1, (B, T, N, H), (B, T, N, H), dtype=dtype)
    cotangents += draw(2, (B, T, N), (B, T, N), dtype=jnp.promote_types(q.dtype, jnp.float32))
    return (q, k, v), tuple(cotangents)


def _definition(q, k, v, *, teacher_window, student_window, scale, segment_ids=None):
    S = k.shape[1]
    windows = Windows(teacher_window or S, student_window or S, scale)
    return definitions.dual_window(q, k, v, segment_ids, windows)


FORMS = {
    "definition": _definition,
    "xla": partial(dual_window_attention_with_lse, implementation="xla"),
}


def _results_and_gradients(operands, cotangents, form="xla", **options):
    results, pull = jax.vjp(partial(FORMS[form], **options), *operands)
    return results, pull(cotangents)


# name: (queries, keys, query heads, kv heads, teacher window, student window, rows per block,
# has documents)
SHAPES = {
    "one block": (12, 12, 2, 2, 7, 3, 256, False),
    "several blocks, ragged": (21, 21, 2, 1, 7, 3, 4, False),
    "several blocks, ragged, documents": (21, 21, 2, 1, 7, 3, 4, True),
    "grouped heads, halo": (13, 30, 4, 2, 9, 4, 4, False),
    "grouped heads, halo, documents": (13, 30, 4, 2, 9, 4, 4, True),
    "halo shorter than the window": (16, 19, 2, 2, 11, 5, 4, True),
    "student sees itself only": (17, 17, 2, 1, 6, 1, 4, True),
    "both see themselves only": (9, 9, 2, 2, 1, 1, 4, False),
    "equal windows": (18, 18, 4, 2, 5, 5, 4, True),
    "teacher one wider": (18, 18, 2, 2, 6, 5, 4, False),
    "teacher wider than the row": (14, 14, 2, 2, 99, 4, 4, True),
    "full attention in halves": (37, 37, 4, 2, None, 6, 4, False),
    "full attention in halves, documents": (37, 37, 4, 2, None, 6, 4, True),
    "both full, in halves, halo": (33, 40, 2, 1, None, None, 4, True),
    "the first window in halves, documents": (72, 72, 4, 2, 33, 6, 4, True),
    "window as long as two blocks": (16, 16, 2, 2, 8, 4, 4, False),
    "one query, many keys": (1, 23, 2, 1, 9, 2, 4, True),
    "one token": (1, 1, 2, 2, None, 1, 256, False),
    "less than a window": (5, 5, 2, 2, 100, 1, 256, False),
    "one window": (20, 20, 2, 1, 9, 9, 256, False),
    "every query has a far band": (12, 40, 2, 1, 39, 3, 256, False),
    "few queries have a far band": (12, 40, 2, 1, 40, 30, 256, False),
    "no room for a far band": (6, 6, 2, 1, 9, 6, 256, False),
    "the last query alone": (1, 30, 2, 2, 20, 10, 256, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_all_forms_equal_the_definition(name, float64, monkeypatch):
    """All four results and the gradients through all four."""
    T, S, N, K, teacher, student, block, has_segments = SHAPES[name]
    monkeypatch.setattr(xla, "_MAX_BLOCK", block)
    operands, cotangents = _inputs(2, T, S, N, K, 4)
    ids = np.sort(np.random.default_rng(3).integers(1, 4, (2, S)), axis=1)
    options = {
        "teacher_window": teacher,
        "student_window": student,
        "segment_ids": jnp.asarray(ids) if has_segments else None,
        "scale": 0.7,
    }

    @jax.jit
    def all_forms(operands, cotangents):
        return [_results_and_gradients(operands, cotangents, form, **options) for form in FORMS]

    expected, found = all_forms(operands, cotangents)
    assert_close(found, expected)


@pytest.mark.parametrize("name", "abcd")
@pytest.mark.parametrize("form", FORMS)
def test_published_values_are_met(name, form, float64, monkeypatch):
    """By the definition, and in small blocks."""
    monkeypatch.setattr(xla, "_MAX_BLOCK", 16)
    if form == "definition":
        monkeypatch.setitem(api.CANDIDATES, "xla", Candidate(definitions.dual_window))
    assert check_attention(Golden(GOLDEN / f"dual_attn_{name}.npz"), "float64").ratio <= 1


def test_documents_of_a_row_equal_rows_of_their_own(float64):
    lengths, windows = (5, 9, 7), {"teacher_window": 6, "student_window": 2}
    (q, k, v), _ = _inputs(1, 21, 21, 2, 1, 4)
    ids = jnp.repeat(jnp.arange(3), jnp.array(lengths))[None]
    ends = np.cumsum(lengths)

    @jax.jit
    def both(*operands):
        packed = dual_window_attention_with_lse(*operands, segment_ids=ids, **windows)
        alone = [
            dual_window_attention_with_lse(*(x[:, end - n : end] for x in operands), **windows)
            for n, end in zip(lengths, ends, strict=True)
        ]
        return packed, tuple(jnp.concatenate(parts, 1) for parts in zip(*alone, strict=True))

    packed, alone = both(q, k, v)
    assert_close(packed, alone)
    assert_close(window_attention(q, k, v, window=2, segment_ids=ids), packed[1])


def test_bfloat16_multiplies_narrow_operands_into_float32_and_stays_near_it(monkeypatch):
    monkeypatch.setattr(xla, "_MAX_BLOCK", 16)
    narrow = _inputs(2, 40, 40, 4, 2, 16, dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    run = jax.jit(partial(_results_and_gradients, teacher_window=24, student_window=8))
    (results, gradients), expected = run(*narrow), run(*wide)
    assert [x.dtype for x in results] == [jnp.bfloat16] * 2 + [jnp.float32] * 2
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 3
    assert_close((results, gradients), expected, 2e-2)
    monkeypatch.setattr(xla, "_MAX_BLOCK", 256)
    eqns = traced(partial(_results_and_gradients, teacher_window=16, student_window=4), *narrow)
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
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


def test_peak_memory_is_linear_in_the_length():
    def peak(T):
        inputs = jax.eval_shape(partial(_inputs, 1, T, T, 2, 1, 16, jnp.float32))
        return temporary_bytes(
            partial(_results_and_gradients, teacher_window=64, student_window=16), *inputs
        )

    small, middle, large = peak(1024), peak(2048), peak(4096)
    assert large - middle <= 2.2 * (middle - small)
    assert large <= 4 * small


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
