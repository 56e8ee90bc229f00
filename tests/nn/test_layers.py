"""Layers without a memory: attention under one window and two, positions, the MLP, its norm."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TWO_ROWS, assert_close, assert_narrow, draw, influence, may_see, randomize
from flax import nnx
from small_models import small_attention

from ttcd_jax import DualWindowAttention, DualWindowConfig, MLPConfig, RopeConfig
from ttcd_jax.nn.attention import Attention
from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.nn.mlp import SwiGLU
from ttcd_jax.nn.product import product
from ttcd_jax.nn.rope import YarnConfig, pair_frequencies, rotate
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


def _mlp(precision=Precision(), **changes):
    return randomize(SwiGLU, MLPConfig(dim=6, hidden_dim=8, precision=precision, **changes))


@pytest.mark.parametrize(
    ("build", "bound"), [(lambda p: _attention(precision=p), 0.05), (lambda p: _mlp(p), 3e-2)]
)
def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32(build, bound):
    assert_narrow(build, lambda m, h: m(h), (2, T, D), bound=bound)
    params = jax.tree.leaves(nnx.state(build(Precision(compute="bfloat16"))))
    assert {x.dtype.name for x in params} == {"float32"}


def test_rows_are_divided_by_their_root_mean_square_in_float32(float64):
    x, weight = draw(0, (3, 4, 7), (7,))
    rows = np.asarray(x)
    expected = weight * rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 0.1)
    assert_close(rms_norm(x, weight, 0.1), expected)
    gradient = jax.grad(lambda x: rms_norm(x, jnp.ones(4), 1e-6).sum())(jnp.zeros((2, 4)))
    assert np.isfinite(gradient).all()
    x, weight = draw(0, (8, 512), (512,), dtype=jnp.bfloat16)
    narrow = rms_norm(x, weight, 1e-6)
    assert narrow.dtype == jnp.bfloat16
    wide = rms_norm(x.astype(jnp.float32), weight.astype(jnp.float32), 1e-6)
    assert_close(narrow, wide, 2**-8)


def test_narrow_operands_have_wide_results_and_narrow_gradients():
    a, b = draw(0, (64, 32), (32, 16), dtype=jnp.bfloat16)
    value, pull = jax.vjp(lambda a, b: product("XF,FZ->XZ", a, b, jnp.float32), a, b)
    assert value.dtype == jnp.float32
    assert_close(value, a.astype(jnp.float32) @ b.astype(jnp.float32))
    assert [x.dtype for x in pull(value)] == [jnp.bfloat16] * 2


HEAD = 8


def _as_complex(x) -> np.ndarray:
    """Pair j of a head is (x[j], x[j + HEAD/2])."""
    first, second = np.split(np.asarray(x), 2, axis=-1)
    return first + 1j * second


def test_pairs_turn_by_their_angle(float64):
    """As a product with exp(i p base^(-2j/HEAD)); angles of a million tokens are float32."""
    (x,) = draw(0, (2, 5, 3, HEAD))
    positions = jnp.array([[0, 1, 2, 3, 4], [7, 9, 11, 500, 4000]])
    frequency = 100.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    turn = np.exp(1j * np.asarray(positions)[..., None, None] * frequency)
    ours = _as_complex(rotate(x, positions, RopeConfig(base=100.0)))
    assert np.abs(ours - _as_complex(x) * turn).max() < 5e-4  # float32 angles up to 4000 radians
    (x,) = draw(0, (1, 1, 1, HEAD), dtype=jnp.bfloat16)
    turned = rotate(x, jnp.array([[999_983]]), RopeConfig())
    assert turned.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.float32), jnp.array([[999_983]]), RopeConfig())
    assert_close(turned, exact, 2**-8)


def _yarn(pair, head_dim, base, factor, original, fast, slow):
    """The frequency of one pair by the paper: wavelength against the original length, with the
    ramp's two corners rounded outward to whole pairs as Hugging Face does."""
    plain = base ** (-2 * pair / head_dim)

    def corner(turns):
        return head_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = math.floor(corner(fast)), math.ceil(corner(slow))
    low, high = max(low, 0), min(high, head_dim - 1)
    if pair <= low:
        return plain
    if pair >= high:
        return plain / factor
    part = (pair - low) / (high - low)
    return (1 - part) * plain + part * plain / factor


@pytest.mark.parametrize(
    ("head_dim", "base", "factor", "original"), [(64, 1e4, 4.0, 2048), (128, 1e6, 8.0, 32768)]
)
def test_yarn_follows_its_formula(head_dim, base, factor, original):
    yarn = YarnConfig(factor=factor, original_length=original)
    frequency, magnitude = pair_frequencies(RopeConfig(base=base, yarn=yarn), head_dim)
    sizes = head_dim, base, factor, original, 32.0, 1.0
    expected = [_yarn(pair, *sizes) for pair in range(head_dim // 2)]
    np.testing.assert_allclose(frequency, expected, rtol=1e-6)
    assert magnitude == pytest.approx(0.1 * math.log(factor) + 1)
    # Fast pairs keep their frequency, slow ones are interpolated.
    plain, _ = pair_frequencies(RopeConfig(base=base), head_dim)
    assert frequency[0] == plain[0]
    assert frequency[-1] == pytest.approx(plain[-1] / factor)
