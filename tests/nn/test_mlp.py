import jax.numpy as jnp
import numpy as np
from checks import assert_close, assert_narrow, draw, randomize
from flax import nnx
from small_models import FLOAT64

from ttcd_jax.nn.mlp import MLPConfig, SwiGLU
from ttcd_jax.precision import Precision


def _module(precision=Precision(), **changes):
    return randomize(SwiGLU, MLPConfig(dim=6, hidden_dim=8, precision=precision, **changes))


def test_output_follows_its_formula(float64):
    mlp = _module(FLOAT64)
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


def test_bfloat16_compute_keeps_float32_parameters():
    assert _module(Precision(compute="bfloat16")).gate[...].dtype == jnp.float32
    assert_narrow(_module, lambda m, x: m(x), (2, 5, 6), bound=3e-2)
