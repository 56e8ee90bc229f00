"""Properties that every method of the registry has, and one from outside the package."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import TWO_ROWS, assert_close, draw, influence, may_see, randomize
from flax import nnx
from small_models import CHUNK, WINDOW, D, config_of, outside_method

from tests.inference import test_reading
from ttcd_jax import Block, Precision, Transformer, TransformerConfig
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.methods import METHODS
from ttcd_jax.models.config import block_configs, forward_flops, switched_off
from ttcd_jax.train.loss import next_token_loss

pytestmark = pytest.mark.usefixtures("float64")

T = 14
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, T)))
OUTSIDE = outside_method()


@pytest.fixture(params=[*sorted(METHODS), OUTSIDE.name])
def method(request, monkeypatch) -> str:
    if request.param == OUTSIDE.name:
        monkeypatch.setitem(METHODS, OUTSIDE.name, OUTSIDE)
    return request.param


def _block(config: TransformerConfig) -> nnx.Module:
    """Layer 0, every parameter drawn."""
    return randomize(Block, block_configs(config)[0])


def test_a_token_depends_on_its_past_its_row_and_its_document_only(method):
    (h,), ids = draw(3, (*TWO_ROWS.shape, D)), jnp.asarray(TWO_ROWS)
    block = _block(config_of(method))
    reach = influence(lambda h: block(h, None, ids, h), h) > 0
    if method in ("swa", "full"):
        visible = may_see(TWO_ROWS, WINDOW if method == "swa" else None)
        np.testing.assert_array_equal(reach, visible)
    assert not reach[~may_see(TWO_ROWS)].any()
    assert reach[0, :, 0].diagonal().all()
    # The first row is one document: every method but a window remembers tokens beyond the window.
    assert reach[0, -1, 0, 0] == (method != "swa")


def test_bfloat16_stays_near_float32(method):
    (h,) = draw(3, (2, T, D), dtype="bfloat16")

    def run(compute):
        block = _block(config_of(method, precision=Precision(compute=compute)))
        return jax.jit(lambda h: block(h, embeddings=h))(h.astype(compute))

    y, rounded = run("float32"), run("bfloat16")
    assert rounded.dtype == jnp.bfloat16
    assert jnp.linalg.norm(rounded.astype("float32") - y) < 0.03 * jnp.linalg.norm(y)


def test_scanned_layers_are_the_unrolled_ones_and_every_parameter_is_trained(method):
    config = config_of(method, fast_layers=(0, 1))
    models = (
        randomize(Transformer, config.replace(scans_layers=x), std=0.3) for x in (True, False)
    )
    (graph, params), (unrolled_graph, unrolled) = map(nnx.split, models)

    def loss(params):
        model = nnx.merge(graph, params)
        return next_token_loss(model, TOKENS), model(TOKENS)

    gradient, scanned = jax.jit(jax.grad(loss, has_aux=True))(params)
    for path, x in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(gradient))[0]:
        rows = np.abs(np.asarray(x)).reshape(len(x), -1).max(-1)
        assert np.isfinite(rows).all(), jax.tree_util.keystr(path)
        assert (rows > 0).any(), jax.tree_util.keystr(path)
    run = jax.jit(lambda params: nnx.merge(unrolled_graph, params)(TOKENS))
    assert_close(scanned, run(unrolled), 1e-9)


def test_pieces_arithmetic_and_state_of_a_method_from_outside_are_right(monkeypatch):
    monkeypatch.setitem(METHODS, OUTSIDE.name, OUTSIDE)
    test_reading.test_any_way_to_read_rows_gives_what_one_pass_gives(OUTSIDE.name, {})
    config, plain = config_of(OUTSIDE.name), config_of("swa")
    memory = 2 * 2 * 32 * config.dim * config.mlp_dim  # read and write, in one layer
    assert forward_flops(config, 32) == forward_flops(plain, 32) + memory
    sizes = state_bytes(config, 1)
    assert sizes["memory"] == 8 * config.dim * config.mlp_dim
    assert sizes["open chunk"] == 8 * CHUNK * (config.dim + config.mlp_dim)
    off = config.replace(memory=config.memory.replace(eta=0.0))
    assert switched_off(config, 32) == off
