from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close

from experiments.studies.mad.models import batch_scores, summed_loss
from experiments.studies.mad.tasks.rows import IGNORE


@pytest.fixture
def golden():
    return np.load(Path(__file__).parents[3] / "golden" / "mad_metrics.npz")


def test_scores_equal_the_reference(golden):
    run = jax.jit(batch_scores)
    batches = zip(golden["in.logits"], golden["in.targets"], strict=True)
    scores = [run(logits, targets) for logits, targets in batches]
    ours = {name: np.array([batch[name] for batch in scores]) for name in scores[0]}
    assert_close(ours["macro_accuracy"], golden["out.batch_macro_acc"], 1e-6)
    assert_close(ours["micro_accuracy"], golden["out.batch_micro_acc"], 1e-6)
    assert_close(ours["loss"], golden["out.batch_loss"], 1e-6)
    epoch = np.mean(ours["macro_accuracy"], dtype=np.float64)
    assert_close(epoch, golden["out.epoch_macro_acc"], 1e-6)
    whole = batch_scores(golden["in.logits"], golden["in.targets"])
    assert_close(whole["macro_accuracy"], golden["out.global_macro_acc"], 1e-6)
    assert abs(epoch - float(whole["macro_accuracy"])) > 1e-3


def test_loss_in_float64_equals_the_reference(float64, golden):
    logits = jnp.asarray(golden["in.logits"][0], float)
    scores = batch_scores(logits, golden["in.targets"][0])
    assert_close(scores["loss"], golden["out.batch_loss"][0])


def test_macro_accuracy_counts_classes_that_are_only_predicted():
    def scores(*predictions):
        return batch_scores(jax.nn.one_hot([predictions], 200), np.array([[0, 0, 1, IGNORE]]))

    assert scores(0, 0, 1, 5)["macro_accuracy"] == 1
    assert scores(0, 1, 1, 5)["macro_accuracy"] == pytest.approx(0.75)
    assert scores(0, 150, 1, 5)["macro_accuracy"] == pytest.approx(0.5)
    assert scores(0, 150, 1, 5)["micro_accuracy"] == pytest.approx(2 / 3)


def test_batch_without_scored_positions():
    targets, logits = np.full((2, 3), IGNORE), np.zeros((2, 3, 4), np.float32)
    scores = batch_scores(logits, targets)
    assert np.isnan([*scores.values()]).all()


def test_loss_has_no_gradient_at_ignored_positions():
    logits = jnp.zeros((1, 2, 4), jnp.bfloat16)
    targets = np.array([[3, IGNORE]])
    loss, gradient = jax.value_and_grad(summed_loss)(logits, targets)
    assert loss.dtype == jnp.float32
    assert loss == pytest.approx(np.log(4))
    assert gradient.tolist() == [[[0.25, 0.25, 0.25, -0.75], [0, 0, 0, 0]]]
