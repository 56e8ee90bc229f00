import math

import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw

from ttcd_jax.nn.rope import RopeConfig, YarnConfig, pair_frequencies, rotate

H = 8


def _as_complex(x) -> np.ndarray:
    """Pair j of a head is (x[j], x[j + H/2])."""
    first, second = np.split(np.asarray(x), 2, axis=-1)
    return first + 1j * second


def test_pairs_turn_by_their_angle(float64):
    """As a product with exp(i p base^(-2j/H))."""
    (x,) = draw(0, (2, 5, 3, H))
    positions = jnp.array([[0, 1, 2, 3, 4], [7, 9, 11, 500, 4000]])
    frequency = 100.0 ** (-np.arange(0, H, 2) / H)
    turn = np.exp(1j * np.asarray(positions)[..., None, None] * frequency)
    ours = _as_complex(rotate(x, positions, RopeConfig(base=100.0)))
    assert np.abs(ours - _as_complex(x) * turn).max() < 5e-4  # float32 angles up to 4000 radians


def test_scores_depend_on_distance_only(float64):
    q, k = draw(0, (1, 6, 1, H), (1, 6, 1, H))

    def scores(start):
        positions = start + jnp.arange(6)[None]
        turned = (rotate(x, positions, RopeConfig()) for x in (q, k))
        return jnp.einsum("BTNH,BSNH->BTS", *turned)

    assert_close(scores(1000), scores(0), 1e-4)


def test_lengths_are_kept_and_position_zero_is_the_identity(float64):
    (x,) = draw(0, (1, 4, 2, H))
    turned = rotate(x, jnp.array([[0, 3, 10**6, 17]]), RopeConfig())
    assert_close(turned[:, 0], x[:, 0])
    assert_close(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), 1e-6)


def test_angles_of_a_million_tokens_are_float32_in_bfloat16():
    (x,) = draw(0, (1, 1, 1, H), dtype=jnp.bfloat16)
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
    expected = [
        _yarn(pair, head_dim, base, factor, original, 32.0, 1.0) for pair in range(head_dim // 2)
    ]
    np.testing.assert_allclose(frequency, expected, rtol=1e-6)
    assert magnitude == pytest.approx(0.1 * math.log(factor) + 1)
    # Fast pairs keep their frequency, slow ones are interpolated.
    plain, _ = pair_frequencies(RopeConfig(base=base), head_dim)
    assert frequency[0] == plain[0]
    assert frequency[-1] == pytest.approx(plain[-1] / factor)


def test_yarn_by_one_changes_nothing():
    yarn = YarnConfig(factor=1.0, original_length=512)
    frequency, magnitude = pair_frequencies(RopeConfig(yarn=yarn), 64)
    np.testing.assert_allclose(frequency, pair_frequencies(RopeConfig(), 64)[0], rtol=1e-6)
    assert magnitude == 1


def test_yarn_scales_what_it_turns(float64):
    (x,) = draw(0, (1, 3, 1, H))
    config = RopeConfig(yarn=YarnConfig(factor=4.0, original_length=64))
    turned = rotate(x, jnp.arange(3)[None], config)
    grown = jnp.linalg.norm(turned, axis=-1) / jnp.linalg.norm(x, axis=-1)
    assert_close(grown, jnp.full(grown.shape, 0.1 * math.log(4) + 1), 1e-6)
