"""One optimizer step as a pure function: (state, batch) -> (state, metrics)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.sharding.rules import constrain
from ttcd_jax.train.loss import summed_loss
from ttcd_jax.train.optimizer import global_norm
from ttcd_jax.train.state import TrainState, logical_axes, with_params

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
        if accumulation_steps == 1:
            (loss, stats), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, batch)
            return loss, grads, stats
        parts = _in_parts(batch, accumulation_steps)
        return _accumulated_gradients(loss_sum, params, logical_axes(config), parts)

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


def _in_parts(batch: Batch, count: int) -> Batch:
    """[B, ...] -> [count, B / count, ...]. Every part takes its rows from all over the batch, so
    that a batch sharded by rows stays where it is."""

    def split(x: jax.Array) -> jax.Array:
        parts = jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)
        return constrain(parts, None, "batch", "length")

    return jax.tree.map(split, batch)


def _accumulated_gradients(
    loss_sum, params: Any, axes: Any, parts: Batch
) -> tuple[jax.Array, Any, Any]:
    """(loss, gradients, mean statistics) of all parts. A part's backward adds what it finds, layer
    by layer, into the one copy of the gradients, which lies as the parameters do."""
    total = jax.tree.map(
        lambda x, names: jax.new_ref(constrain(jnp.zeros_like(x), *names)), params, axes
    )

    def add_part(_, part):
        loss, pull, stats = jax.vjp(lambda x: loss_sum(x, part), params, has_aux=True)
        pull.with_refs(total)(jnp.ones_like(loss))
        return None, (loss, stats)

    _, (losses, stats) = jax.lax.scan(add_part, None, parts)
    grads = jax.tree.map(jax.freeze, total)
    return losses.sum(), grads, jax.tree.map(lambda x: x.mean(0), stats)
