import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw, randomize
from flax import nnx
from small_models import FLOAT64

from ttcd_jax.memory.delta_rule import delta_rule, l2_normalize_inside
from ttcd_jax.methods.delta_net import (
    DeltaNet,
    DeltaNetConfig,
    DeltaRuleConfig,
    DeltaSublayer,
    DeltaSublayerConfig,
)
from ttcd_jax.methods.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from ttcd_jax.precision import Precision

D, N, H = 6, 2, 4
X = 6
CONFIGS = {
    DeltaSublayer: DeltaSublayerConfig,
    DeltaNet: DeltaNetConfig,
    GatedDeltaNet: GatedDeltaNetConfig,
}


def _config(layer, **changes):
    rule = DeltaRuleConfig(value_expansion=1.5, chunk_size=4)
    fields = {"dim": D, "num_heads": N, "head_dim": H, "rule": rule, "precision": FLOAT64}
    return CONFIGS[layer](**fields | changes)


def test_the_sublayer_is_the_delta_rule_between_projections(float64):
    module = randomize(DeltaSublayer, _config(DeltaSublayer))
    (h,) = draw(1, (2, 9, D))
    q, k, v = ((h @ w[...]).reshape(2, 9, N, -1) for w in (module.query, module.key, module.value))
    beta = jax.nn.sigmoid(h @ module.rate[...])
    q, k = l2_normalize_inside(q), l2_normalize_inside(k)
    o, _ = delta_rule(q, k, v, beta, chunk_size=1, state_dtype=jnp.float64)
    assert_close(module(h), o.reshape(2, 9, -1) @ module.out[...])


def test_parameters_start_as_published():
    config = _config(GatedDeltaNet, precision=Precision(), dim=64, num_heads=512)
    params = nnx.to_pure_dict(nnx.state(GatedDeltaNet(config, rngs=nnx.Rngs(0)), nnx.Param))
    shapes = {name: x.shape for name, x in params.items()}
    assert shapes == {
        **dict.fromkeys(("query", "key"), (64, 512 * H)),
        **dict.fromkeys(("value", "gate"), (64, 512 * X)),
        **dict.fromkeys(("rate", "decay"), (64, 512)),
        **dict.fromkeys(("query_conv", "key_conv"), (4, 512 * H)),
        "value_conv": (4, 512 * X),
        **dict.fromkeys(("decay_log", "decay_bias"), (512,)),
        "head_norm": (X,),
        "out": (512 * X, 64),
    }
    for name in ("query", "key", "value", "gate", "rate", "decay", "out"):
        assert float(params[name].std()) == pytest.approx(0.02, rel=0.05), name
    taps = np.asarray(params["key_conv"])
    assert taps.min() == pytest.approx(-0.5, rel=0.01)
    assert taps.max() == pytest.approx(0.5, rel=0.01)
    speed, step = np.exp(params["decay_log"]), np.log1p(np.exp(params["decay_bias"]))
    assert np.quantile(speed, (0, 0.5, 1)) == pytest.approx((0, 8, 16), abs=1)
    assert np.quantile(step, (0, 0.5, 1)) == pytest.approx((0.001, 0.01, 0.1), rel=0.2)
