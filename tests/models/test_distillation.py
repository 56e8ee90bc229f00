"""The distances to the teacher of a whole model, layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TWO_ROWS, assert_close, randomize, traced
from flax import nnx
from small_models import config_of

from ttcd_jax.models.config import layers_with_teacher
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.row import Row

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, TWO_ROWS.shape))
LAYERS = {"num_layers": 4, "fast_layers": (0, 2)}


def _model(method="ipttcd", **changes):
    return randomize(Transformer, config_of(method, **LAYERS | changes))


def _found(model):
    found = nnx.jit(lambda model: model.distillation(TOKENS, jnp.asarray(TWO_ROWS)))(model)
    return _numbers(found)


def _numbers(found):
    return found._replace(is_moved=found.is_moved.astype(float))


@pytest.mark.parametrize(
    "changes", [{"scans_layers": False}, {"remat": "block"}, {"remat": "none"}], ids=str
)
def test_unrolled_and_recomputed_models_have_the_distances_of_the_scanned_one(changes, float64):
    found = _found(_model())
    assert found.off.shape == (2, *TOKENS.shape)
    assert_close(_found(_model(**changes)), found)


def test_every_layer_reports_its_own_distances_in_order(float64):
    """Against the block of the layer alone, on what the block before it leaves."""
    model = _model(num_layers=2, fast_layers=(0, 1), scans_layers=False)
    found = _found(model)
    h = model.embedding[...][TOKENS]
    graph, params = nnx.split(model.group_0)
    for layer in range(2):
        block = nnx.merge(graph, jax.tree.map(lambda x, i=layer: x[i], params)).block_0
        h, expected = block.forward(
            h, Row.of(h, None, jnp.asarray(TWO_ROWS), h)._replace(measures=True)
        )
        assert_close(jax.tree.map(lambda x, i=layer: x[i], found), _numbers(expected))


def test_equal_windows_have_no_gap(float64):
    found = _found(_model("ipttcd_ideal", student_window=4))
    assert found.off.max() < 1e-12
    assert found.teacher.min() > 0
    assert _found(_model("ipttcd_ideal")).off.max() > 0.01


def test_only_methods_with_a_teacher_have_distances():
    for method in ("swa", "ipttt", "lact"):
        assert layers_with_teacher(config_of(method)) == []
    assert layers_with_teacher(config_of("ipttcd", **LAYERS)) == [0, 2]
    assert layers_with_teacher(config_of("ipttcd_ideal")) == [0]


def test_a_forward_that_is_not_measured_computes_nothing_for_it(float64):
    """Measured, a layer has nine more products: three with W_base, and delta_w and two of the read,
    for two kinds of features."""
    model = _model(scans_layers=False)

    def products(run):
        return sum(eqn.primitive.name == "dot_general" for eqn in traced(run, TOKENS))

    assert products(lambda x: model.distillation(x)) - products(lambda x: model.forward(x)) == 2 * 9
