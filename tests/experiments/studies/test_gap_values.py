"""Other combinations of the views, against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
from checks import assert_close, draw, refused
from flax import nnx

from ttcd_jax import MemoryConfig
from ttcd_jax.methods.ipttcd import IPTTCDConfig
from ttcd_jax.nn.mlp import MLPConfig

STUDY = "experiments.studies.gap_values"


def _layer(config, **changes):
    memory = MemoryConfig(chunk_size=4, corrects_errors=True, teacher_conv_init="normal")
    mlp = MLPConfig(dim=6, hidden_dim=8, init_std=0.5)
    return config.layer(config(mlp=mlp, memory=memory.replace(**changes)), rngs=nnx.Rngs(0))


def _written(layer, x, t):
    """(tokens, writes, writes of equal windows) of one chunk."""
    tokens = jax.tree.map(lambda x: x[:, None], layer.tokens(x, t))
    convolved = layer.convolved(tokens, None)
    return tokens, layer.operands(convolved)[1], layer.without_gap(convolved, None)


def _through(layer, values, beta):
    return beta[..., None] * (values @ layer.down[...] @ layer.proj[...])


def test_shared_taps_convolve_the_gap_and_leave_the_keys(study):
    x, t, taps = draw(1, (1, 4, 6), (1, 4, 6), (5, 8))
    plain, layer = _layer(IPTTCDConfig), _layer(study.SharedTapsConfig)
    for some in (plain, layer):
        some.teacher_conv[...] = taps
    tokens, writes, free = _written(layer, x, t)
    gap = np.asarray(tokens.teacher - tokens.student)[0, 0]
    moved = [sum(taps[4 - n] * gap[i - n] for n in range(min(i, 4) + 1)) for i in range(4)]
    assert_close(writes.errors[0, 0], _through(layer, np.stack(moved), tokens.beta[0, 0]), 1e-5)
    assert_close(writes.keys, _written(plain, x, t)[1].keys, 1e-6)
    assert_close(free.errors, np.zeros_like(free.errors), 1e-6)


def test_two_values_are_that_of_equal_windows_and_the_scaled_gap_under_one_key(study):
    x, t, scale = draw(1, (1, 4, 6), (1, 4, 6), (8,))
    plain, layer = _layer(IPTTCDConfig), _layer(study.TwoValuesConfig)
    layer.gap_scale[...] = scale
    tokens, writes, free = _written(layer, x, t)
    equal_tokens, equal, _ = _written(plain, x, x)
    equal_values = equal.errors / equal_tokens.beta[..., None]
    gap = _through(layer, scale * (tokens.teacher - tokens.student), tokens.beta)
    assert_close(writes.errors, tokens.beta[..., None] * equal_values + gap, 1e-5)
    assert_close(free.errors, tokens.beta[..., None] * equal_values, 1e-5)
    assert_close(writes.keys, equal.keys, 1e-6)
    terms = {
        study.ValueAndTeacherConfig: (tokens.teacher, tokens.teacher),
        study.ValueAndStudentConfig: (-tokens.student, -tokens.teacher),
    }
    for config, of_windows in terms.items():
        layer = _layer(config)
        layer.gap_scale[...] = scale
        for found, term in zip(_written(layer, x, t)[1:], of_windows, strict=True):
            second = _through(layer, scale * term, tokens.beta)
            assert_close(found.errors, tokens.beta[..., None] * equal_values + second, 1e-5)


def test_errors_less_their_mean_add_up_to_zero_before_the_gate(study):
    x, t = draw(1, (1, 4, 6), (1, 4, 6))
    tokens, plain, _ = _written(_layer(IPTTCDConfig), x, t)
    _, writes, _ = _written(_layer(study.LessMeanConfig), x, t)
    beta = tokens.beta[..., None]
    errors = plain.errors / beta
    assert_close(writes.errors, beta * (errors - errors.mean(-2, keepdims=True)), 1e-5)
    assert_close(writes.rate, plain.rate, 0)


def test_the_mean_is_that_of_a_document_and_is_not_known_token_by_token(study):
    layer = _layer(study.LessMeanConfig, error="gap")
    x, t = draw(1, (1, 4, 6), (1, 4, 6))
    ids = jnp.array([[[1, 1, 2, 2]]])

    def errors(x):
        tokens = jax.tree.map(lambda x: x[:, None], layer.tokens(x, t))
        return layer.operands(layer.convolved(tokens, ids))[1].errors[0, 0]

    assert_close(errors(x)[2:], errors(x.at[:, :2].add(1))[2:], 1e-6)
    refused("token by token", layer.start, 1)
