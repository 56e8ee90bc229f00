import jax
import jax.numpy as jnp
import numpy as np
from checks import assert_close, distance, draw

from ttcd_jax.nn.linear import rms_norm


def test_rows_are_divided_by_their_root_mean_square(float64):
    x, weight = draw(0, (3, 4, 7), (7,))
    rows = np.asarray(x)
    expected = weight * rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 0.1)
    assert_close(rms_norm(x, weight, 0.1), expected)


def test_gradient_agrees_with_finite_differences(float64):
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
