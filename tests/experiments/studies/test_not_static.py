"""Errors less a map of the student's features: zero at its start, fitted whatever the loss."""

import jax
import jax.numpy as jnp
import numpy as np
from checks import assert_close, draw, refused
from flax import nnx

from ttcd_jax import MemoryConfig
from ttcd_jax.methods.ipttcd import IPTTCDConfig
from ttcd_jax.nn.mlp import MLPConfig

STUDY = "experiments.studies.not_static"


def _layer(config, **changes):
    memory = MemoryConfig(chunk_size=4, error="gap", corrects_errors=True).replace(**changes)
    mlp = MLPConfig(dim=6, hidden_dim=8, init_std=0.5)
    return config.layer(config(mlp=mlp, memory=memory), rngs=nnx.Rngs(0))


def _errors(layer, x, t):
    """(z_S, gate, errors) of every token."""
    tokens = jax.tree.map(lambda x: x[:, None], layer.tokens(x, t))
    return tokens.student, tokens.beta, layer.operands(layer.convolved(tokens, None))[1].errors


def test_the_map_is_subtracted_under_the_gate(study):
    x, t, static = draw(1, (1, 4, 6), (1, 4, 6), (8, 6))
    errors = _errors(_layer(IPTTCDConfig), x, t)[-1]
    for config in (study.LessMapConfig, study.LessFitConfig):
        layer = _layer(config)
        assert_close(_errors(layer, x, t)[-1], errors, 1e-6)
        layer.static[...] = static
        student, beta, less = _errors(layer, x, t)
        assert_close(less, errors - beta[..., None] * (student @ layer.static[...]), 1e-5)
    layer = _layer(study.MapConfig)
    layer.static[...] = static
    student, beta, alone = _errors(layer, x, t)
    assert_close(alone, -beta[..., None] * (student @ layer.static[...]), 1e-5)


def test_of_equal_windows_the_map_is_the_learned_value_of_the_package(study):
    x, static = draw(1, (1, 4, 6), (8, 6))
    mapped, own = _layer(study.LessMapConfig), _layer(IPTTCDConfig, error="learned", has_proj=False)
    mapped.static[...], own.value[...] = -static, static
    assert_close(_errors(own, x, x)[-1], _errors(mapped, x, x)[-1], 1e-6)


def test_a_map_without_a_gate_and_of_normalized_errors_is_refused(study):
    for change in ({"has_token_rate": False}, {"normalizes_errors": True}):
        refused("subtracted under the gate", _layer, study.LessMapConfig, **change)


def test_a_fitted_map_has_the_gradient_of_least_squares_whatever_the_loss(study):
    x, t, static = draw(1, (1, 4, 6), (1, 4, 6), (8, 6))
    layer = _layer(study.LessFitConfig)
    layer.static[...] = static
    student, beta, less = _errors(layer, x, t)
    for scale in (0.0, 7.0):
        grads = nnx.grad(lambda layer, by=scale: by * jnp.sum(_errors(layer, x, t)[-1] ** 2))(layer)
        left = np.asarray(less / beta[..., None]).reshape(-1, 6)
        wanted = -np.asarray(student).reshape(-1, 8).T @ left / len(left)
        # The gate multiplies the cotangent of the loss, not that of the fit.
        assert_close(grads.static[...], wanted, 1e-5)
