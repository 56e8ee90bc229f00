import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TWO_ROWS, assert_close, assert_narrow, draw, influence, may_see, randomize
from small_models import small_attention

from ttcd_jax.errors import UserError
from ttcd_jax.nn.attention import Attention
from ttcd_jax.nn.rope import RopeConfig
from ttcd_jax.nn.row import Row

T, D = 10, 6


def _module(**changes):
    return randomize(Attention, small_attention(**{"window": 3} | changes))


@pytest.mark.parametrize("window", [1, 3, None])
def test_a_token_depends_on_its_window_of_its_document_and_nothing_else(window, float64):
    attention = _module(window=window, has_qk_norm=True)
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


def test_output_follows_its_formula(float64):
    attention = _module(has_qk_norm=True, qk_norm_eps=0.1, rope=RopeConfig(base=50.0))
    (h,) = draw(1, (1, T, D))
    ours = jax.jit(lambda h: attention(h))(h)
    assert_close(ours[0], _by_formula(attention, np.asarray(h[0])), 1e-6)  # float32 angles


def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32():
    assert_narrow(lambda p: _module(precision=p), lambda m, h: m(h), (2, T, D), bound=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"head_dim": 0}, "head_dim 0 must be at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads 0 must be at least 1"),
        ({"window": 0}, "window 0 must be at least 1"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        small_attention(**changes)
