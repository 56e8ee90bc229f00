from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, dot_operand_types, draw, largest_array, traced

from ttcd_jax.train.loss import summed_loss, token_scores

B, T, D, V = 2, 7, 6, 13


def _inputs(dtype=None):
    hidden, head = draw(0, (B, T, D), (V, D), dtype=dtype)
    rng = np.random.default_rng(1)
    targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    return hidden, head, targets, jnp.asarray(rng.random((B, T)) < 0.6)


def _naive(hidden, head, targets, mask):
    log_probability = jax.nn.log_softmax(hidden @ head.T)
    return -jnp.where(mask, jnp.take_along_axis(log_probability, targets[..., None], -1)[..., 0], 0)


@pytest.mark.parametrize("rows", [1, 4, 5, 14, 1024])
def test_blocks_of_rows_equal_the_naive_loss(rows, float64):
    """Value and both gradients, for blocks that divide the 14 rows and blocks that do not; scores
    of tokens."""
    hidden, head, targets, mask = _inputs()

    @jax.jit
    def all_ways(hidden, head):
        results = []
        for run in (
            lambda h, w: summed_loss(h, w, targets, mask, rows),
            lambda h, w: _naive(h, w, targets, mask).sum(),
        ):
            value, pull = jax.vjp(run, hidden, head)
            results.append((value, pull(jnp.asarray(0.7))))
        return *results, token_scores(hidden, head, targets, rows=rows)

    ours, naive, (losses, is_hit) = all_ways(hidden, head)
    assert_close(ours, naive)
    assert_close(losses, _naive(hidden, head, targets, jnp.ones_like(mask)))
    assert_same(is_hit, (hidden @ head.T).argmax(-1) == targets)


def test_large_logits_stay_finite():
    hidden, head, targets, mask = _inputs()
    loss = jax.value_and_grad(lambda h: summed_loss(1e4 * h, head, targets, mask))
    assert all(np.isfinite(x).all() for x in loss(hidden))


def test_bfloat16_multiplies_narrow_operands_and_sums_in_float32():
    hidden, head, targets, mask = _inputs(jnp.bfloat16)
    run = jax.value_and_grad(lambda h, w: summed_loss(h, w, targets, mask, 4), argnums=(0, 1))
    assert dot_operand_types(traced(run, hidden, head)) == {"bfloat16"}
    value, gradients = jax.jit(run)(hidden, head)
    assert value.dtype == jnp.float32
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 2
    wide = jax.jit(run)(hidden.astype(jnp.float32), head.astype(jnp.float32))
    assert_close((value, gradients), wide, 2e-2)


def test_no_array_holds_all_logits_of_a_large_vocabulary():
    """Traced only: 129,280 entries, 4 rows of 4,096 tokens in bfloat16, a float32 head."""
    vocab, rows, tokens = 129_280, 512, (4, 4096)
    shapes = ((*tokens, 64), "bfloat16"), ((vocab, 64), "float32"), (tokens, "int32")
    operands = [jax.ShapeDtypeStruct(*shape) for shape in (*shapes, (tokens, bool))]
    loss = jax.value_and_grad(partial(summed_loss, rows=rows), argnums=(0, 1))
    assert largest_array(traced(loss, *operands)) == rows * vocab
    losses = traced(partial(token_scores, rows=rows), *operands[:3])
    assert largest_array(losses) == rows * vocab
