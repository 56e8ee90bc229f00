import jax
import jax.numpy as jnp
import numpy as np
from checks import assert_close, dot_operand_types, draw, randomize, traced
from flax import nnx

from ttcd_jax.nn.mlp import MLPConfig, SwiGLU
from ttcd_jax.precision import Precision


def _module(precision=Precision(), **changes):
    return randomize(SwiGLU, MLPConfig(dim=6, hidden_dim=8, precision=precision, **changes))


def test_output_follows_its_formula(float64):
    mlp = _module(Precision(param="float64", compute="float64", state="float64"))
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
    mlp = _module(Precision(compute="bfloat16"))
    (x,) = draw(1, (2, 5, 6), dtype=jnp.bfloat16)
    assert mlp.gate[...].dtype == jnp.float32
    assert mlp.features(x).dtype == mlp(x).dtype == jnp.bfloat16
    graph, params = nnx.split(mlp)

    def loss(params, x):
        return nnx.merge(graph, params)(x).astype(jnp.float32).sum()

    eqns = traced(jax.grad(loss, argnums=(0, 1)), params, x)
    assert dot_operand_types(eqns) == {"bfloat16"}
    assert_close(mlp(x), _module()(x.astype(jnp.float32)))
