"""Scores by the MAD protocol; their values are compared with the published code's in parity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.mad.scores import batch_scores, macro_accuracy, micro_accuracy, summed_loss
from experiments.mad.tasks.rows import IGNORE


def test_macro_accuracy_counts_classes_that_are_only_predicted():
    targets = np.array([[0, 0, 1, IGNORE]])
    accuracy = partial(macro_accuracy, targets=targets, num_classes=200)
    assert accuracy(np.array([[0, 0, 1, 5]])) == 1
    assert accuracy(np.array([[0, 1, 1, 5]])) == pytest.approx(0.75)
    assert accuracy(np.array([[0, 150, 1, 5]])) == pytest.approx(0.5)
    assert micro_accuracy(np.array([[0, 150, 1, 5]]), targets) == pytest.approx(2 / 3)


def test_batch_without_scored_positions():
    targets, logits = np.full((2, 3), IGNORE), np.zeros((2, 3, 4), np.float32)
    scores = batch_scores(logits, targets)
    assert (scores.macro_accuracy, scores.micro_accuracy) == (0, 0)
    assert np.isnan(scores.loss)


def test_loss_has_no_gradient_at_ignored_positions():
    logits = jnp.zeros((1, 2, 4), jnp.bfloat16)
    targets = np.array([[3, IGNORE]])
    loss, gradient = jax.value_and_grad(summed_loss)(logits, targets)
    assert loss.dtype == jnp.float32
    assert loss == pytest.approx(np.log(4))
    assert gradient.tolist() == [[[0.25, 0.25, 0.25, -0.75], [0, 0, 0, 0]]]
