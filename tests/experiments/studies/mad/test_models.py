import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, draw, randomize, value_and_gradients
from flax import nnx

from experiments.studies.mad.models import MAD_METHODS, Autoencoder, mad_config, sinusoids
from experiments.studies.mad.tasks.settings import BASELINES
from ttcd_jax.models.config import switched_off
from ttcd_jax.models.transformer import Transformer

TASK = BASELINES["in-context-recall"]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (2, 11)), jnp.int32)


def tiny(method="ipttcd"):
    return mad_config(method, TASK, window=4, dim=16, mlp_dim=24)


def num_params(model_class, config):
    model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_the_published_sizes():
    D, F, V = 128, 256, 16
    swa = mad_config("swa", TASK)
    block = 4 * D * D + 3 * D * F + 2 * D
    plain = 2 * block + 2 * V * D + D
    assert num_params(Transformer, swa) == plain
    memory = D * D + D + 2 * 5 * F  # P, b, two convolutions of five taps
    ipttcd = mad_config("ipttcd", TASK)
    assert num_params(Transformer, ipttcd) == plain + 2 * memory
    assert num_params(Autoencoder, swa) == plain + 2 * (D * D + 2 * D)
    assert (ipttcd.window, ipttcd.student_window, ipttcd.memory.chunk_size) == (32, 16, 16)
    assert mad_config("full", TASK).window is None


def test_the_delta_rule_changes_no_size():
    found = mad_config("ipttcd", TASK, corrects_errors=True)
    assert found.memory.corrects_errors
    assert num_params(Transformer, found) == num_params(Transformer, mad_config("ipttcd", TASK))
    assert mad_config("swa", TASK, corrects_errors=True) == mad_config("swa", TASK)


@pytest.mark.parametrize("method", MAD_METHODS)
@pytest.mark.parametrize("model_class", [Transformer, Autoencoder])
def test_logits_of_every_token(method, model_class):
    config = tiny(method)
    logits = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0))(TOKENS))
    assert logits.shape == (2, 11, 16)


def test_the_table_of_positions():
    table = np.asarray(sinusoids(5, 8))
    assert table.shape == (5, 8)
    assert_close(table[3, :4], np.sin(3 * 10_000.0 ** -(np.arange(4) / 3)), 1e-5)
    assert_close(table[3, 4:], np.cos(3 * 10_000.0 ** -(np.arange(4) / 3)), 1e-5)


def test_an_autoencoder_reads_the_last_state_alone_and_every_parameter_learns():
    model = randomize(Autoencoder, tiny(), std=0.3)
    (h,) = draw(0, (2, 11, 16))
    assert_same(model.normed(h), model.normed(jnp.zeros_like(h).at[:, -1].set(h[:, -1])))
    _, gradients, _ = value_and_gradients(model, lambda model: model(TOKENS))
    dead = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
        if not np.abs(leaf).max() > 0
    ]
    assert dead == []


@pytest.mark.parametrize("method", MAD_METHODS)
def test_a_memory_that_is_off_keeps_parameters_and_forgets(method):
    config = tiny(method)
    off = switched_off(config, TOKENS.shape[1])
    if method in ("deltanet", "gated_deltanet", "swa", "full"):
        assert off is None
        return
    model = randomize(Transformer, config)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Transformer(off, rngs=nnx.Rngs(0))))
    loud, silent = jax.jit(model), jax.jit(nnx.merge(graph, nnx.state(model)))
    other = TOKENS.at[:, 0].set((TOKENS[:, 0] + 1) % 16)
    # Two windows of four reach six tokens back: what is older comes through the memory.
    assert np.abs(loud(TOKENS) - loud(other))[:, -1].max() > 1e-6
    assert np.abs(silent(TOKENS) - silent(other))[:, -1].max() < 1e-6
