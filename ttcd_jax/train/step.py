"""One optimizer step as a pure function: (state, batch) -> (state, metrics)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Shaped

from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.block import MemoryStats
from ttcd_jax.sharding.rules import constrain
from ttcd_jax.train.bad_steps import judged
from ttcd_jax.train.loss import summed_loss
from ttcd_jax.train.optimizer import global_norm
from ttcd_jax.train.state import Params, TrainState, logical_axes, with_params

Batch = dict[str, Shaped[Array, "..."]]
Metrics = dict[str, jax.typing.ArrayLike]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
Copies = dict[str, Float[Array, "V D"]]  # of parameters, exchanged once in a step
# (parameters, step) -> the parameters of the step's loss
Prepare = Callable[[Params, Int[Array, ""]], Params]
# (parameters, batch, step) -> ((loss summed over the marked targets, other metrics), gradients)
Gradients = Callable[
    [Params, Batch, Int[Array, ""]], tuple[tuple[Float[Array, ""], Metrics], Params]
]


class Forward(NamedTuple):
    """The results of the forward pass over the rows computed at once, without gradient."""

    hidden: Float[Array, "B T D"]  # final normed hidden states
    stats: MemoryStats | None  # arrays [fast layers]; None without such layers
    batch: Batch


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    *,
    accumulation_steps: int = 1,
    loss_rows: int,
    spike_factor: float | None = None,
    prepare: Prepare = lambda params, step: params,
    measure: Callable[[Forward], Metrics] = lambda forward: {},
) -> TrainStep:
    """The step of a language model on batches of tokens, positions, targets, loss_mask and, unless
    every row is one document, segment_ids; computed in `accumulation_steps` parts, which do not
    change the loss. `prepare` makes the parameters of the loss. The metrics have those that
    `measure` finds in the forward pass, the mean of the parts."""

    def loss_sum(
        params: Params, batch: Batch, step: jax.Array, copies: Copies
    ) -> tuple[jax.Array, Metrics]:
        model = with_params(config, prepare(params, step)).take_copies(copies)
        segment_ids = batch.get("segment_ids")
        hidden, stats = model.forward(batch["tokens"], segment_ids, batch["positions"])
        marked = batch["targets"], batch["loss_mask"]
        loss = summed_loss(hidden, model.head_weight(), *marked, loss_rows)
        return loss, measure(jax.lax.stop_gradient(Forward(hidden, stats, batch)))

    of_copies = jax.value_and_grad(loss_sum, has_aux=True)
    if accumulation_steps > 1:
        of_copies = _accumulated(loss_sum, logical_axes(config), accumulation_steps)

    def gradients(params: Params, batch: Batch, step: jax.Array) -> Any:
        return of_copies(params, batch, step, with_params(config, params).copies())

    return step_with(gradients, optimizer, learning_rate, spike_factor)


def step_with(
    gradients: Gradients,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    spike_factor: float | None = None,
) -> TrainStep:
    """The step of any model whose batches have a `loss_mask`; its loss is the mean over the marked
    targets. Metrics: loss (nats), grad_norm (before the clip), learning_rate, and those that
    `gradients` return.

    A step whose loss or gradient is not finite changes nothing. A state with `skips` counts such
    steps, and those with a gradient norm above `spike_factor` times its average, which change
    nothing either (`train.bad_steps`).
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        count = batch["loss_mask"].sum()
        (loss, found), grads = gradients(state["params"], batch, state["step"])
        loss, count = loss / count, jnp.maximum(count, 1)  # no target: no mean, no gradient
        # Where bfloat16 would round the count, and float16 has none above 65,504.
        wide = count.astype(jnp.promote_types(loss.dtype, jnp.float32))
        grads = jax.tree.map(lambda g: (g / wide).astype(g.dtype), grads)
        rate = learning_rate(state["step"])
        metrics = {"loss": loss, "grad_norm": global_norm(grads), "learning_rate": rate}
        before = _at_step(state["opt_state"], state["step"])
        updates, opt_state = optimizer.update(grads, before, state["params"])
        new = TrainState(params=state["params"], opt_state=opt_state, step=state["step"] + 1)
        is_good = is_finite(metrics)
        if "skips" in state:
            is_good, new["skips"], metrics = judged(state["skips"], metrics, is_good, spike_factor)
        new["params"], new["opt_state"] = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old),
            (optax.apply_updates(state["params"], updates), opt_state),
            (state["params"], state["opt_state"]),
        )
        return new, metrics | found

    return train_step


def _at_step(opt_state: Any, step: Int[Array, ""]) -> Any:
    """The optimizer's state with its schedules at this step: their own counts lack skipped ones."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def moved(node: Any) -> Any:
        return node._replace(count=step) if is_schedule(node) else node

    return jax.tree.map(moved, opt_state, is_leaf=is_schedule)


def is_finite(metrics: Metrics) -> Bool[Array, ""]:
    """Whether loss and gradient of a step are finite, so that it changed the parameters."""
    return jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])


def in_parts(batch: Batch, count: int) -> Batch:
    """[B, ...] -> [count, B / count, ...], every `count`-th row in a part, so that a batch sharded
    by rows is not moved."""

    def split(x: jax.Array) -> jax.Array:
        parts = jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)
        return constrain(parts, None, "batch", "length")

    return jax.tree.map(split, batch)


def _accumulated(loss_sum: Callable, axes: Params, count: int) -> Callable:
    """Gradients of a batch in `count` parts, and their mean metrics. The backward of every part
    adds to one copy of the gradients, layer by layer, sharded by the parameters' `axes`."""

    def gradients(
        params: Params, batch: Batch, step: jax.Array, copies: Copies
    ) -> tuple[tuple[jax.Array, Metrics], Params]:
        total = jax.tree.map(
            lambda x, names: jax.new_ref(constrain(jnp.zeros_like(x), *names)), params, axes
        )

        def add_part(_: None, part: Batch) -> tuple[None, tuple[jax.Array, Metrics]]:
            in_part = functools.partial(loss_sum, batch=part, step=step, copies=copies)
            loss, pull, found = jax.vjp(in_part, params, has_aux=True)
            pull.with_refs(total)(jnp.ones_like(loss))
            return None, (loss, found)

        _, (losses, found) = jax.lax.scan(add_part, None, in_parts(batch, count))
        means = jax.tree.map(lambda x: x.mean(0), found)
        return (losses.sum(), means), jax.tree.map(jax.freeze, total)

    return gradients
