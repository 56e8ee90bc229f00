"""Layers without a memory. What they compute is compared with the reference (tests/parity), other
scalings of positions with transformers (tests/interop); their reach is in tests/models."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw
from ttcd_kernels.measure import temp_bytes

from ttcd_jax import RopeConfig
from ttcd_jax.nn.linear import rms_norm, weight_product
from ttcd_jax.nn.rope import YarnConfig, pair_frequencies, rotate

T, D = 10, 6


@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (lambda x, weight: rms_norm(x, weight, 1e-6), [(8, 512), (512,)]),
        # Angles of a million tokens are float32.
        (lambda x: rotate(x, jnp.array([[999_983]]), RopeConfig()), [(1, 1, 1, 8)]),
    ],
    ids=["rms_norm", "rotate"],
)
def test_bfloat16_rounds_results_alone(run, shapes):
    inputs = draw(0, *shapes, dtype=jnp.bfloat16)
    narrow = run(*inputs)
    assert narrow.dtype == jnp.bfloat16
    assert_close(narrow, run(*(x.astype(jnp.float32) for x in inputs)), 2**-8)


@pytest.mark.parametrize(
    ("head_dim", "base", "factor", "original"), [(64, 1e4, 4.0, 2048), (128, 1e6, 8.0, 32768)]
)
def test_yarn_follows_its_formula(head_dim, base, factor, original):
    """A ramp between pairs, rounded outward to whole ones as in Hugging Face; the small heads whose
    logits are compared with transformers have none."""
    pair, cycle = np.arange(head_dim // 2), original / (2 * math.pi)
    fast, slow = (head_dim * math.log(cycle / turns, base) / 2 for turns in (32, 1))
    share = np.interp(pair, [math.floor(fast), math.ceil(slow)], [0, 1])
    yarn = YarnConfig(factor=factor, original_length=original)
    frequency, magnitude = pair_frequencies(RopeConfig(base=base, yarn=yarn), head_dim)
    expected = base ** (-2 * pair / head_dim) * (1 - share + share / factor)
    np.testing.assert_allclose(frequency, expected, rtol=1e-6)
    assert magnitude == pytest.approx(0.1 * math.log(factor) + 1)


def test_one_row_of_bfloat16_reads_a_kernel_once():
    """XLA's own product of one row writes the kernel in float32 at every token."""
    x, kernel = draw(0, (1, 1, 256), (256, 192), dtype=jnp.bfloat16)
    compiled = jax.jit(weight_product).lower(x, kernel).compile()
    assert temp_bytes(compiled) < kernel.nbytes
    y = compiled(x, kernel)
    assert (y.shape, y.dtype) == ((1, 1, 192), jnp.bfloat16)
    assert_close(y, weight_product(*(a.astype(jnp.float32) for a in (x, kernel))), 2**-8)
