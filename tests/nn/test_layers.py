"""Layers without a memory. What they compute is compared with the reference (tests/parity), the
scalings of positions with transformers (tests/interop), their reach in tests/models."""

import jax
import jax.numpy as jnp
import pytest
from checks import TWO_ROWS, assert_close, assert_narrow, draw, randomize
from flax import nnx
from small_models import small_attention

from ttcd_jax import DualWindowAttention, DualWindowConfig, MLPConfig, RopeConfig
from ttcd_jax.nn.attention import Attention
from ttcd_jax.nn.linear import rms_norm
from ttcd_jax.nn.mlp import SwiGLU
from ttcd_jax.nn.rope import rotate
from ttcd_jax.precision import Precision

T, D = 10, 6


@pytest.mark.parametrize("teacher", [5, None])
def test_outputs_are_those_of_two_attentions_with_these_weights(teacher, float64):
    config = DualWindowConfig(attention=small_attention(window=teacher), student_window=2)
    dual = randomize(DualWindowAttention, config)
    (h,) = draw(1, (*TWO_ROWS.shape, D))
    ids = jnp.asarray(TWO_ROWS)

    def single(window):
        config = dual.config.replace(window=window)
        attention = nnx.eval_shape(lambda: Attention(config, rngs=nnx.Rngs(0)))
        nnx.update(attention, nnx.state(dual, nnx.Param))
        return jax.jit(attention)(h, None, ids)

    ours = jax.jit(dual)(h, None, ids)
    assert_close(tuple(ours), (single(teacher), single(2)))


@pytest.mark.parametrize(
    ("cls", "config", "bound"),
    [(Attention, small_attention(window=3), 0.05), (SwiGLU, MLPConfig(dim=D, hidden_dim=8), 3e-2)],
)
def test_bfloat16_multiplies_narrow_operands_and_stays_near_float32(cls, config, bound):
    def build(precision):
        return randomize(cls, config.replace(precision=precision))

    assert_narrow(build, lambda m, h: m(h), (2, T, D), bound=bound)
    params = jax.tree.leaves(nnx.state(build(Precision(compute="bfloat16"))))
    assert {x.dtype.name for x in params} == {"float32"}


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
