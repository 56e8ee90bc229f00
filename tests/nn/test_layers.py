"""Layers without a memory: attention under one window and two, the MLP, its norm and products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import (
    TWO_ROWS,
    assert_close,
    assert_narrow,
    distance,
    draw,
    influence,
    may_see,
    randomize,
)
from flax import nnx
from small_models import FLOAT64, small_attention

from ttcd_jax.nn.attention import Attention, DualWindowAttention, DualWindowConfig
from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.nn.mlp import MLPConfig, SwiGLU
from ttcd_jax.nn.product import product
from ttcd_jax.nn.rope import RopeConfig
from ttcd_jax.nn.row import Row
from ttcd_jax.precision import Precision

T, D = 10, 6


def _attention(**changes):
    return randomize(Attention, small_attention(**{"window": 3} | changes))


@pytest.mark.parametrize("window", [1, 3, None])
def test_a_token_depends_on_its_window_of_its_document_and_nothing_else(window, float64):
    attention = _attention(window=window, has_qk_norm=True)
    (h,) = draw(1, (*TWO_ROWS.shape, D))
    ids = jnp.asarray(TWO_ROWS)
    reach = influence(lambda h: attention(h, Row.of(h).positions, ids), h)
    np.testing.assert_array_equal(reach > 0, may_see(TWO_ROWS, window))


def _by_formula(attention, h):
    """numpy, head by head."""
    c = attention.config
    weights = {
        name: np.asarray(getattr(attention, name)[...])
        for name in ("query", "key", "value", "out", "query_norm", "key_norm")
    }

    def heads(name, norm=None):
        x = (h @ weights[name]).reshape(T, -1, c.head_dim)
        if norm is None:
            return x
        x = weights[norm] * x / np.sqrt((x**2).mean(-1, keepdims=True) + c.qk_norm_eps)
        first, second = np.split(x, 2, axis=-1)
        angle = np.arange(T)[:, None] * c.rope.base ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    q, k, v = heads("query", "query_norm"), heads("key", "key_norm"), heads("value")
    outs = []
    for n in range(c.num_heads):
        kv = n // (c.num_heads // c.num_kv_heads)
        score = q[:, n] @ k[:, kv].T / np.sqrt(c.head_dim)
        weight = np.exp(score) * may_see(np.zeros((1, T)), c.window)[0, :, 0]
        outs.append(weight / weight.sum(-1, keepdims=True) @ v[:, kv])
    return np.concatenate(outs, axis=-1) @ weights["out"]


def test_attention_follows_its_formula(float64):
    attention = _attention(has_qk_norm=True, qk_norm_eps=0.1, rope=RopeConfig(base=50.0))
    (h,) = draw(1, (1, T, D))
    ours = jax.jit(lambda h: attention(h))(h)
    assert_close(ours[0], _by_formula(attention, np.asarray(h[0])), 1e-6)  # float32 angles


def _dual(teacher=5):
    config = DualWindowConfig(attention=small_attention(window=teacher), student_window=2)
    return randomize(DualWindowAttention, config)


@pytest.mark.parametrize("teacher", [5, None])
def test_outputs_are_those_of_two_attentions_with_these_weights(teacher, float64):
    dual = _dual(teacher)
    (h,) = draw(1, (*TWO_ROWS.shape, D))
    ids = jnp.asarray(TWO_ROWS)

    def single(window):
        config = dual.config.replace(window=window)
        attention = nnx.eval_shape(lambda: Attention(config, rngs=nnx.Rngs(0)))
        nnx.update(attention, nnx.state(dual, nnx.Param))
        return jax.jit(attention)(h, None, ids)

    ours = jax.jit(dual)(h, None, ids)
    assert_close(tuple(ours), (single(teacher), single(2)))


def test_the_first_tokens_of_a_document_have_no_error_to_learn_from(float64):
    (h,) = draw(1, (1, T, D))
    ids = jnp.asarray(np.repeat([[5, 2, 9]], [4, 1, 5], axis=1))
    teacher, student = jax.jit(_dual())(h, Row.of(h).positions, ids)
    equal = np.asarray(jnp.isclose(teacher, student, rtol=1e-12, atol=1e-12).all(-1)[0])
    assert equal.tolist() == [True, True, False, False, True, True, True, False, False, False]


def _mlp(precision=Precision(), **changes):
    return randomize(SwiGLU, MLPConfig(dim=6, hidden_dim=8, precision=precision, **changes))


def test_the_mlp_follows_its_formula(float64):
    mlp = _mlp(FLOAT64)
    (x,) = draw(1, (2, 5, 6))
    gate, up, down = (np.asarray(w[...]) for w in (mlp.gate, mlp.up, mlp.down))
    a = np.asarray(x) @ gate
    features = a / (1 + np.exp(-a)) * (np.asarray(x) @ up)
    assert_close(mlp.features(x), features)
    assert_close(mlp(x), features @ down)


def test_weights_start_with_the_asked_deviation():
    mlp = SwiGLU(MLPConfig(dim=64, hidden_dim=128, init_std=0.3), rngs=nnx.Rngs(0))
    for weight in (mlp.gate, mlp.up, mlp.down):
        assert 0.28 < float(jnp.std(weight[...])) < 0.32


@pytest.mark.parametrize(
    ("build", "bound"), [(lambda p: _attention(precision=p), 0.05), (lambda p: _mlp(p), 3e-2)]
)
def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32(build, bound):
    assert_narrow(build, lambda m, h: m(h), (2, T, D), bound=bound)
    assert {
        x.dtype.name for x in jax.tree.leaves(nnx.state(build(Precision(compute="bfloat16"))))
    } == {"float32"}


def test_rows_are_divided_by_their_root_mean_square(float64):
    x, weight = draw(0, (3, 4, 7), (7,))
    rows = np.asarray(x)
    expected = weight * rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 0.1)
    assert_close(rms_norm(x, weight, 0.1), expected)


def test_the_gradient_of_the_norm_is_that_of_finite_differences(float64):
    x, weight, direction = draw(0, (2, 5), (5,), (2, 5))

    def run(x):
        return jnp.sum(jnp.sin(rms_norm(x, weight, 1e-6)))

    step = 1e-6
    numeric = (run(x + step * direction) - run(x - step * direction)) / (2 * step)
    assert distance(jnp.sum(jax.grad(run)(x) * direction), numeric) < 1e-8


def test_zero_rows_stay_zero_with_a_finite_gradient():
    gradient = jax.grad(lambda x: rms_norm(x, jnp.ones(4), 1e-6).sum())(jnp.zeros((2, 4)))
    assert np.isfinite(gradient).all()


def test_bfloat16_is_normed_in_float32():
    x, weight = draw(0, (8, 512), (512,), dtype=jnp.bfloat16)
    narrow = rms_norm(x, weight, 1e-6)
    assert narrow.dtype == jnp.bfloat16
    wide = rms_norm(x.astype(jnp.float32), weight.astype(jnp.float32), 1e-6)
    assert_close(narrow, wide, 2**-8)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("BLF,FD->BLD", [(2, 3, 4), (4, 5)]),
        ("BLF,BLD->BFD", [(2, 3, 4), (2, 3, 5)]),
        ("BCLF,BJMF->BCLJM", [(2, 2, 3, 4), (2, 5, 3, 4)]),
    ],
)
def test_gradients_are_those_of_einsum(equation, shapes, float64):
    a, b = draw(0, *shapes)

    def both(run):
        value, pull = jax.vjp(run, a, b)
        return value, pull(jnp.cos(value))

    ours = both(lambda a, b: product(equation, a, b, jnp.float64))
    assert_close(ours, both(lambda a, b: jnp.einsum(equation, a, b)))


def test_narrow_operands_have_wide_results_and_narrow_gradients():
    a, b = draw(0, (64, 32), (32, 16), dtype=jnp.bfloat16)
    value, pull = jax.vjp(lambda a, b: product("XF,FZ->XZ", a, b, jnp.float32), a, b)
    assert value.dtype == jnp.float32
    assert_close(value, a.astype(jnp.float32) @ b.astype(jnp.float32))
    assert [x.dtype for x in pull(value)] == [jnp.bfloat16] * 2
