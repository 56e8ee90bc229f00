"""One optimizer step as a pure function: (state, batch) -> (state, metrics)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ttcd_jax.models.catalog import TransformerConfig
from ttcd_jax.train.loss import summed_loss
from ttcd_jax.train.optimizer import global_norm
from ttcd_jax.train.state import TrainState, with_params

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    *,
    accumulation_steps: int = 1,
    loss_rows: int,
) -> TrainStep:
    """The step of a run. The loss is the mean over the batch's marked targets, however many parts
    the batch is computed in. Metrics: loss (nats), grad_norm (before the clip), learning_rate,
    and [fast layers] memory_ratio and gate_mean.

    A step whose loss or gradient is not finite leaves parameters and optimizer as they were; its
    metrics tell.
    """

    def loss_sum(params: Any, batch: Batch) -> tuple[jax.Array, Any]:
        model = with_params(config, params)
        hidden, stats = model.forward(batch["tokens"], batch["segment_ids"], batch["positions"])
        head = model.head_weight()
        return summed_loss(hidden, head, batch["targets"], batch["loss_mask"], loss_rows), stats

    def gradients(params: Any, batch: Batch) -> tuple[jax.Array, Any, Any]:
        def add_part(total, part):
            (loss, stats), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, part)
            loss_total, grad_total = total
            return (loss_total + loss, jax.tree.map(jnp.add, grad_total, grads)), stats

        if accumulation_steps == 1:
            (loss, stats), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, batch)
            return loss, grads, stats
        parts = jax.tree.map(lambda x: x.reshape(accumulation_steps, -1, *x.shape[1:]), batch)
        first = jax.eval_shape(lambda p, b: loss_sum(p, b)[0], params, batch)
        zero = (jnp.zeros((), first.dtype), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), stats = jax.lax.scan(add_part, zero, parts)
        return loss, grads, jax.tree.map(lambda x: x.mean(0), stats)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        count = jnp.maximum(batch["loss_mask"].sum(), 1)
        loss, grads, stats = gradients(state["params"], batch)
        loss, grads = loss / count, jax.tree.map(lambda g: g / count.astype(g.dtype), grads)
        norm = global_norm(grads)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
        new = (optax.apply_updates(state["params"], updates), opt_state)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old),
            new,
            (state["params"], state["opt_state"]),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate(state["step"]),
        }
        metrics |= stats._asdict() if stats is not None else {}
        return TrainState(params=params, opt_state=opt_state, step=state["step"] + 1), metrics

    return train_step
