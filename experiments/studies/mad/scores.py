"""Accuracy and loss by the MAD protocol: macro-averaged within a batch, then averaged over batches.

Targets of -100 are not scored. Macro accuracy is the mean recall over the classes that a batch has
as targets *or as predictions*: a class that is only predicted, wrongly, counts as a recall of 0.
The score of an epoch is the plain mean over its batches, which differs from the score of all
batches at once. Micro accuracy is the share of scored positions that are right.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.studies.mad.tasks.rows import IGNORE
from ttcd_jax.train.step import Metrics


def summed_loss(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Float[Array, ""]:
    """Cross entropy summed over scored positions in nats, float32 or better. Differentiable in
    `logits`."""
    state = jnp.promote_types(logits.dtype, jnp.float32)
    log_probs = jax.nn.log_softmax(logits.astype(state), axis=-1)
    classes = jnp.maximum(targets, 0)
    losses = -jnp.take_along_axis(log_probs, classes[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(targets != IGNORE, losses, 0))


def batch_scores(logits: Float[Array, "... V"], targets: Int[Array, "..."]) -> Metrics:
    """macro_accuracy (the published score), micro_accuracy and loss, the mean cross entropy in
    nats, of one batch; the prediction is the first of the likeliest classes. All are NaN
    without a scored position."""
    predictions, is_scored = jnp.argmax(logits, axis=-1), targets != IGNORE
    is_hit = is_scored & (predictions == targets)

    def count(classes: jax.Array, chosen: jax.Array) -> jax.Array:
        weights = chosen.ravel().astype(jnp.int32)
        return jnp.bincount(classes.ravel(), weights, length=logits.shape[-1])

    num_targets, num_hits = count(targets, is_scored), count(targets, is_hit)
    num_present = jnp.sum(num_targets + count(predictions, is_scored) > 0)
    recalls = num_hits / jnp.maximum(num_targets, 1)
    return {
        "macro_accuracy": jnp.sum(recalls) / num_present,
        "micro_accuracy": jnp.sum(is_hit) / jnp.sum(is_scored),
        "loss": summed_loss(logits, targets) / jnp.sum(is_scored),
    }
