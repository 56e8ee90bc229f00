import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, distance, draw
from ttcd_kernels.normalize import NORM_EPS, PUBLISHED_ZERO_SLOPE, l2_normalize


def test_normalised_vectors_have_length_one(float64):
    (x,) = draw(0, (5, 7))
    unit = l2_normalize(x)
    assert_close(jnp.linalg.norm(unit, axis=-1), jnp.ones(5))
    assert_close(unit * jnp.linalg.norm(x, axis=-1, keepdims=True), x)


def test_normalisation_has_the_gradient_of_finite_differences(float64):
    x, weight, direction = draw(0, (3, 7), (3, 7), (3, 7))

    def run(x):
        return jnp.sum(weight * l2_normalize(x))

    step = 1e-6
    numeric = (run(x + step * direction) - run(x - step * direction)) / (2 * step)
    assert distance(jnp.sum(jax.grad(run)(x) * direction), numeric) < 1e-8


@pytest.mark.parametrize("slope", [1.0, PUBLISHED_ZERO_SLOPE])
@pytest.mark.parametrize("length", [0.0, 0.5 * NORM_EPS])
def test_below_the_smallest_norm_the_slope_is_the_one_asked_for(slope, length):
    x = jnp.zeros(4).at[0].set(length)
    assert_close(l2_normalize(x, slope), x / NORM_EPS)
    assert_close(jax.jacobian(l2_normalize)(x, slope), slope * jnp.eye(4))


def test_the_published_slope_is_the_exact_derivative_below_the_smallest_norm(float64):
    x, step = jnp.array([0.3e-6, 0.0]), 1e-8
    numeric = (l2_normalize(x + step) - l2_normalize(x - step)) / (2 * step)
    slope = jax.jvp(lambda x: l2_normalize(x, PUBLISHED_ZERO_SLOPE), (x,), (jnp.ones(2),))[1]
    assert distance(slope, numeric) < 1e-6


def test_zero_vectors_do_not_disturb_their_neighbours():
    (x,) = draw(0, (2, 4))
    gradient = jax.grad(lambda x: l2_normalize(x).sum())
    assert_close(gradient(x.at[0].set(0))[1], gradient(x)[1])
    assert np.isfinite(gradient(x.at[0].set(0))).all()


def test_bfloat16_is_normalised_in_float32():
    (x,) = draw(0, (64, 256), dtype=jnp.bfloat16)
    unit = l2_normalize(x)
    assert unit.dtype == jnp.bfloat16
    assert_close(unit, l2_normalize(x.astype(jnp.float32)), 2**-8)
