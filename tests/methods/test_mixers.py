"""Methods that replace attention: LaCT and the delta rule."""

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import FLOAT64, SETTINGS, config_of, small_attention

from ttcd_jax import AttentionConfig, Precision
from ttcd_jax.methods.delta_net import DeltaRuleConfig
from ttcd_jax.methods.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from ttcd_jax.methods.lact import LaCT, LaCTConfig, LaCTMemoryConfig
from ttcd_jax.models.config import block_configs

D, T, L = 8, 14, 4


def _config(precision=FLOAT64, **changes) -> LaCTConfig:
    attention = small_attention(dim=D, num_heads=2, window=3, precision=precision)
    memory = {"num_fast_heads": 2, "chunk_size": L, "low_rank": 2} | changes
    return LaCTConfig(attention=attention, memory=LaCTMemoryConfig(**memory))


def _module(precision=FLOAT64, **changes) -> LaCT:
    return checks.randomize(LaCT, _config(precision, **changes))


# Every switch that is not as published.
OTHER = {"low_rank": None, "hidden_expansion": 1.5, "keeps_raw_state": True, "has_rope": False}
OTHER |= dict.fromkeys(("has_momentum", "has_value_silu", "has_scale"), False)
OTHER |= dict.fromkeys(("has_qk_norm", "has_qkv_bias"), True)


@pytest.mark.parametrize("changes", [{}, OTHER, {"resets_at_document": False}])
def test_a_token_depends_on_the_past_of_its_document_and_nothing_else(changes, float64):
    """And the memory reaches beyond the window, to every earlier chunk of the document; that as
    published leaks from document to document."""
    module, (h,) = _module(**changes), checks.draw(1, (*checks.TWO_ROWS.shape, D))
    reach = checks.influence(lambda h: module(h, segment_ids=jnp.asarray(checks.TWO_ROWS)), h) > 0
    ids = (
        checks.TWO_ROWS
        if module.config.memory.resets_at_document
        else np.zeros_like(checks.TWO_ROWS)
    )
    expected = checks.may_see(ids) & checks.after_chunk(T, L) | checks.may_see(checks.TWO_ROWS, 3)
    np.testing.assert_array_equal(reach, expected)


def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32():
    ids = jnp.asarray(np.repeat([[3, 8], [4, 4]], [6, 8], axis=1))
    checks.assert_narrow(
        lambda precision: _module(precision, low_rank=None),
        lambda module, h: module(h, segment_ids=ids),
        (2, T, D),
        bound=0.1,
    )


def test_rates_keep_their_digits_in_bfloat16():
    (h,) = checks.draw(1, (2, T, D), dtype=jnp.bfloat16)
    rates = _module(Precision(compute="bfloat16"))._rates(h)
    assert rates.dtype == jnp.float32
    checks.assert_close(rates, _module(Precision())._rates(h.astype(jnp.float32)), 0.02)


def test_a_zero_hidden_state_has_finite_gradients():
    module = LaCT(_config(Precision()), rngs=nnx.Rngs(0))
    h = jnp.zeros((1, T, D)).at[:, 3].set(1)
    results = checks.value_and_gradients(module, lambda m, h: m(h), h)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))


def test_start_is_as_published():
    """Wide enough to measure the deviations."""
    config = LaCTConfig(
        attention=AttentionConfig(dim=256, num_heads=4, num_kv_heads=4, head_dim=64, window=None),
        memory=LaCTMemoryConfig(
            num_fast_heads=2, low_rank=16, hidden_expansion=0.5, has_qkv_bias=True, has_qk_norm=True
        ),
    )
    module = LaCT(config, rngs=nnx.Rngs(0))
    full = LaCT(config.replace(memory=config.memory.replace(low_rank=None)), rngs=nnx.Rngs(0))
    stds = dict.fromkeys(("qkv", "rate", "scale", "momentum", "out"), 0.02) | {"w1": 64**-0.5}
    stds |= dict.fromkeys(("w0_left", "w2_left"), 0.5 * 16**-0.5)
    stds |= dict.fromkeys(("w0_right", "w2_right"), 0.5 * 128**-0.5)
    stds |= dict.fromkeys(("w0", "w2"), 128**-0.5)
    for name, std in stds.items():
        drawn = getattr(module, name, None) or getattr(full, name)
        checks.assert_close(jnp.std(drawn[...]), std, 0.1)
    ones = dict.fromkeys(("query_norm", "key_norm", "fast_norm", "qk_scale"), 1)
    zeros = ("qkv_bias", "rate_bias", "scale_bias", "momentum_bias", "qk_offset")
    for name, value in (ones | dict.fromkeys(zeros, 0)).items():
        assert (np.asarray(getattr(module, name)[...]) == value).all(), name
    w0 = module.w0_right[...] @ module.w0_left[...] + 0.5 * jnp.eye(128, 64)
    checks.assert_close(module._start().w0, w0)


def test_rates_start_at_a_thousandth(float64):
    module = LaCT(_config(), rngs=nnx.Rngs(0))
    checks.assert_close(module._rates(jnp.zeros((1, 3, D))), jnp.full((1, 3, 2, 3), 0.001), 1e-9)


def test_parameters_of_the_gated_delta_rule_start_as_published(monkeypatch):
    config = GatedDeltaNetConfig(dim=64, num_heads=512, head_dim=4)
    params = nnx.to_pure_dict(nnx.state(GatedDeltaNet(config, rngs=nnx.Rngs(0)), nnx.Param))
    for name in ("query", "key", "value", "gate", "rate", "decay", "out"):
        assert float(params[name].std()) == pytest.approx(0.02, rel=0.05), name
    taps = np.asarray(params["key_conv"])
    assert taps.min() == pytest.approx(-0.5, rel=0.01)
    assert taps.max() == pytest.approx(0.5, rel=0.01)
    speed, step = np.exp(params["decay_log"]), np.log1p(np.exp(params["decay_bias"]))
    assert np.quantile(speed, (0, 0.5, 1)) == pytest.approx((0, 8, 16), abs=1)
    assert np.quantile(step, (0, 0.5, 1)) == pytest.approx((0.001, 0.01, 0.1), rel=0.2)
    # A speed of 0 would stay 0, its logarithm -inf.
    monkeypatch.setattr(
        *(jax.random, "uniform"),
        lambda key, shape, dtype=float, minval=0, maxval=1: jnp.full(shape, minval, dtype),
    )
    assert jnp.isfinite(GatedDeltaNet(config, rngs=nnx.Rngs(0)).decay_log[...]).all()


def test_keys_of_the_delta_rule_can_start_at_the_token_before(float64):
    """What is read after a token that came before is what followed it."""
    rule = DeltaRuleConfig(chunk_size=L, conv_init="previous")
    sizes = {"dim": D, "num_heads": 2, "head_dim": 4, "precision": FLOAT64, "init_std": 1.0}
    layer = GatedDeltaNet(GatedDeltaNetConfig(**sizes, rule=rule), rngs=nnx.Rngs(0))
    for name, lag in (("query", 0), ("key", 1), ("value", 0)):
        expected = np.zeros((4, 8))
        expected[3 - lag] = 1
        checks.assert_same(getattr(layer, f"{name}_conv")[...], expected)
    (h,) = checks.draw(1, (1, T, D))
    h = h.at[:, -1].set(h[:, 5])  # token 6 followed it
    query, writes = layer._operands(h, layer._convolved(layer._project(h), None))
    overlaps = jnp.einsum("BNH,BSNH->SN", query[:, -1], writes.k)
    assert overlaps.argmax(axis=0).tolist() == [6, 6]
    checks.assert_close(overlaps[6], jnp.ones(2), 1e-4)


def test_the_arrays_of_a_state_are_donated_one_by_one():
    """Also where the raw weights start as those that are read."""
    memory = SETTINGS["lact"].replace(keeps_raw_state=True)
    layer = block_configs(config_of("lact", memory=memory))[0].mixer.build(rngs=nnx.Rngs(0))
    arrays = jax.tree.leaves(layer.start(2, None))
    after = jax.jit(lambda x: [2 * y for y in x], donate_argnums=0)(arrays)
    assert len(after) == len(arrays)
