from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, draw, randomize, value_and_gradients
from flax import nnx

from experiments.studies.mad.models import (
    Autoencoder,
    batch_scores,
    mad_config,
    sinusoids,
    summed_loss,
)
from experiments.studies.mad.records import MAD_METHODS
from experiments.studies.mad.tasks import BASELINES, IGNORE
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
    paths = jax.tree_util.tree_leaves_with_path(gradients)
    assert [jax.tree_util.keystr(path) for path, x in paths if not np.abs(x).max() > 0] == []


@pytest.mark.parametrize("method", MAD_METHODS)
def test_logits_are_of_every_token_and_a_memory_that_is_off_keeps_parameters_and_forgets(method):
    config = tiny(method)
    logits = nnx.eval_shape(lambda: Autoencoder(config, rngs=nnx.Rngs(0))(TOKENS))
    assert logits.shape == (2, 11, 16)
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


@pytest.fixture
def golden():
    return np.load(Path(__file__).parents[3] / "golden" / "mad_metrics.npz")


def test_loss_in_float64_equals_the_reference_and_its_mean_is_not_that_of_all_batches(
    float64, golden
):
    """Parity has the scores of every batch."""
    logits, targets = jnp.asarray(golden["in.logits"], float), golden["in.targets"]
    assert_close(batch_scores(logits[0], targets[0])["loss"], golden["out.batch_loss"][0])
    whole = batch_scores(logits, targets)["macro_accuracy"]
    assert abs(golden["out.epoch_macro_acc"] - whole) > 1e-3


@pytest.mark.parametrize(
    ("predictions", "macro", "micro"),
    [((0, 0, 1, 5), 1, 1), ((0, 1, 1, 5), 0.75, 2 / 3), ((0, 150, 1, 5), 0.5, 2 / 3)],
)
def test_macro_accuracy_counts_classes_that_are_only_predicted(predictions, macro, micro):
    logits, targets = jax.nn.one_hot([predictions], 200), np.array([[0, 0, 1, IGNORE]])
    scores = batch_scores(logits, targets)
    assert scores["macro_accuracy"] == pytest.approx(macro)
    assert scores["micro_accuracy"] == pytest.approx(micro)
    assert np.isnan([*batch_scores(logits, np.full_like(targets, IGNORE)).values()]).all()


def test_loss_has_no_gradient_at_ignored_positions():
    logits = jnp.zeros((1, 2, 4), jnp.bfloat16)
    targets = np.array([[3, IGNORE]])
    loss, gradient = jax.value_and_grad(summed_loss)(logits, targets)
    assert loss.dtype == jnp.float32
    assert loss == pytest.approx(np.log(4))
    assert gradient.tolist() == [[[0.25, 0.25, 0.25, -0.75], [0, 0, 0, 0]]]
