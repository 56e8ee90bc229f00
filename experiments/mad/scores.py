"""Accuracy and loss by the MAD protocol: macro-averaged within a batch, then averaged over batches.

Targets of -100 are not scored. Two things differ from the usual. Macro accuracy is the mean recall
over the classes that a batch has as targets *or as predictions*: a class that is only predicted,
wrongly, counts as a recall of 0, one that is neither is left out. And an epoch's score is the
plain mean of its batches' values (`epoch_scores`), which differs from the score of all batches at
once. Micro accuracy, the share of scored positions that are right, is reported beside it.

All functions but `epoch_scores` may be called inside jit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.mad.tasks.rows import IGNORE


class MADScores(NamedTuple):
    """Macro accuracy (the published score), micro accuracy, and cross entropy in nats."""

    macro_accuracy: Float[Array, ""] | float
    micro_accuracy: Float[Array, ""] | float
    loss: Float[Array, ""] | float


def macro_accuracy(
    predictions: Int[Array, "..."], targets: Int[Array, "..."], num_classes: int
) -> Float[Array, ""]:
    """Mean over classes c with tp + fp + fn > 0 of tp_c / (tp_c + fn_c), 0 without targets of c.

    `num_classes` is static; 0 for a batch without a scored position.
    """
    is_scored = targets != IGNORE

    def count(classes: jax.Array, chosen: jax.Array) -> jax.Array:
        weights = chosen.ravel().astype(jnp.int32)
        return jnp.bincount(classes.ravel(), weights, length=num_classes)

    num_targets = count(targets, is_scored)
    num_predicted = count(predictions, is_scored)
    num_hits = count(targets, is_scored & (predictions == targets))
    num_present = jnp.sum(num_targets + num_predicted > 0)
    return jnp.sum(num_hits / jnp.maximum(num_targets, 1)) / jnp.maximum(num_present, 1)


def micro_accuracy(predictions: Int[Array, "..."], targets: Int[Array, "..."]) -> Float[Array, ""]:
    """Share of scored positions that are right; 0 for a batch without a scored position."""
    is_scored = targets != IGNORE
    is_hit = is_scored & (predictions == targets)
    return jnp.sum(is_hit) / jnp.maximum(jnp.sum(is_scored), 1)


def batch_loss(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Float[Array, ""]:
    """Mean cross entropy over scored positions in nats, float32 or better; NaN without any.
    Differentiable in `logits`."""
    is_scored = targets != IGNORE
    state = jnp.promote_types(logits.dtype, jnp.float32)
    log_probs = jax.nn.log_softmax(logits.astype(state), axis=-1)
    classes = jnp.where(is_scored, targets, 0)
    losses = -jnp.take_along_axis(log_probs, classes[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(is_scored, losses, 0)) / jnp.sum(is_scored)


def batch_scores(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> MADScores:
    """All three of one batch; the prediction is the first of the likeliest classes."""
    predictions = jnp.argmax(logits, axis=-1)
    return MADScores(
        macro_accuracy=macro_accuracy(predictions, targets, logits.shape[-1]),
        micro_accuracy=micro_accuracy(predictions, targets),
        loss=batch_loss(logits, targets),
    )


def epoch_scores(batches: Sequence[MADScores]) -> MADScores:
    """The mean of the batches' values, as Python floats."""
    return MADScores(*np.mean(np.asarray(batches, np.float64), axis=0).tolist())
