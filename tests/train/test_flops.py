import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ttcd_jax.layers.ipttcd import MemoryConfig
from ttcd_jax.models.catalog import TransformerConfig
from ttcd_jax.train.flops import forward_flops, training_flops_per_token, visible_pairs
from ttcd_jax.train.state import abstract_model

LENGTH = 32
MODEL = TransformerConfig(
    vocab_size=11,
    dim=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=12,
    method="full",
    fast_layers=(1,),
    student_window=4,
    memory=MemoryConfig(chunk_size=8, form="associative"),
    attention_implementation="reference",
    scans_layers=False,
)


def _dot_flops(jaxpr):
    """2 m k n of every matrix product in a program without loops."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += (
                2
                * math.prod(eqn.outvars[0].aval.shape)
                * math.prod(shape[axis] for axis in contracted)
            )
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += _dot_flops(inner)
    return total


def _counted(config):
    graph, params = nnx.split(abstract_model(config))
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    return _dot_flops(jax.make_jaxpr(lambda p, t: nnx.merge(graph, p)(t))(params, tokens).jaxpr)


@pytest.mark.parametrize("method", ["full", "ipttcd"])
def test_the_formula_counts_every_matrix_product_of_an_unrolled_model(method):
    config = MODEL.replace(method=method)
    width = config.dim
    # The reference attention computes all T x T scores, on fast layers once per window; the token
    # rate is a product with one column, left out of the formula.
    dense = config.num_layers * 4 * (LENGTH**2 - visible_pairs(LENGTH, None)) * width
    if method == "ipttcd":
        dense += 4 * LENGTH**2 * width + 2 * LENGTH * config.dim
    assert _counted(config) == forward_flops(config, LENGTH) + dense


def test_visible_pairs_counts_the_mask():
    for length, window in ((7, 3), (7, None), (5, 9), (1, 1)):
        reach = length if window is None else window
        pairs = sum(0 <= i - j < reach for i in range(length) for j in range(length))
        assert visible_pairs(length, window) == pairs


def test_training_is_three_forward_passes_per_token():
    assert training_flops_per_token(MODEL, LENGTH) == 3 * forward_flops(MODEL, LENGTH) / LENGTH
