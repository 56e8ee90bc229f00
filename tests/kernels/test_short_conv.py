"""The convolved residual in XLA, its rounding, and the norm of its keys. Its results and gradients:
`test_xla.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, draw
from ttcd_kernels.normalize import NORM_EPS, PUBLISHED_ZERO_SLOPE, l2_normalize
from ttcd_kernels.short_conv import short_conv, short_conv_residual

F = 5
CAUSAL = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "symmetric"])


@pytest.mark.parametrize("slope", [1.0, PUBLISHED_ZERO_SLOPE])
def test_a_zero_key_passes_on_its_gradient_times_the_slope(slope):
    z, d_key = draw(0, (1, 1, 4, F), (1, 1, 4, F))
    z = z.at[0, 0, 2].set(0)
    identity = jnp.ones((1, F))

    def key(z_student):
        facts = {"is_causal": True, "normalizes_keys": True, "zero_slope": slope}
        return short_conv_residual(z, z_student, identity, identity, **facts)[2]

    gradient = jax.vjp(key, z)[1](d_key)[0]
    assert_close(gradient[0, 0, 2], slope * d_key[0, 0, 2])


@CAUSAL
def test_each_convolution_is_rounded_once_and_the_rest_starts_from_that(is_causal):
    shapes = [(2, 3, 7, F)] * 2 + [(5, F)] * 2
    z_teacher, z_student, *taps = narrow = draw(5, *shapes, dtype=jnp.bfloat16)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, shapes[0][:3]))
    wide = [x.astype(jnp.float32) for x in narrow]
    convolve = functools.partial(short_conv, is_causal=is_causal, segment_ids=ids)
    target = convolve(wide[0], wide[2]).astype(jnp.bfloat16)
    student = convolve(wide[1], wide[3]).astype(jnp.bfloat16)
    facts = {"is_causal": is_causal, "normalizes_keys": True, "segment_ids": ids}
    found = short_conv_residual(z_teacher, z_student, *taps, **facts)
    assert_same(found, (target - student, target, l2_normalize(student)))


@pytest.mark.parametrize("slope", [1.0, PUBLISHED_ZERO_SLOPE])
@pytest.mark.parametrize("length", [0.0, 0.5 * NORM_EPS])
def test_below_the_smallest_norm_the_slope_is_the_one_asked_for(slope, length):
    """That of x / NORM_EPS is the published one."""
    x = jnp.zeros(4).at[0].set(length)
    assert_close(l2_normalize(x, slope), x / NORM_EPS)
    assert_close(jax.jacobian(l2_normalize)(x, slope), slope * jnp.eye(4))


def test_narrow_vectors_are_normalised_wide():
    (x,) = draw(0, (64, 256), dtype=jnp.bfloat16)
    unit = l2_normalize(x)
    assert unit.dtype == jnp.bfloat16
    assert_close(unit, l2_normalize(x.astype(jnp.float32)), 2**-8)
