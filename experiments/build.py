"""From a `RunConfig` to the objects of a run: data, optimizer, jitted step, state."""

import functools
from typing import Any

import jax
import optax

from experiments.run_config import RunConfig
from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.sources import build_source, vocab_size
from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.errors import UserError
from ttcd_jax.train.optimizer import OptimizerConfig, build_optimizer
from ttcd_jax.train.schedule import learning_rate
from ttcd_jax.train.state import TrainState, init_state
from ttcd_jax.train.step import TrainStep, make_train_step

BATCH_FIELDS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


def check(config: RunConfig) -> None:
    """What no single configuration can see. Raises `UserError`."""
    needed = vocab_size(config.data)
    if config.model.vocab_size < needed:
        raise UserError(
            f"model vocab_size {config.model.vocab_size} is smaller than the data's {needed}: set "
            f"TransformerConfig.vocab_size to at least {needed}"
        )


def build_data(config: RunConfig) -> tuple[Batches, dict[str, Any]]:
    """(batches of the training split, manifest)."""
    source, manifest = build_source(config.data, seed=config.seed)
    batches = Batches(
        source,
        batch_size=config.batch_size,
        seed=config.seed,
        is_shuffled=not isinstance(config.data, RecallConfig),
    )
    return batches, manifest


def _optimizer(config: RunConfig) -> tuple[OptimizerConfig, optax.GradientTransformation]:
    """The schedule lasts as long as the run, unless it says otherwise."""
    schedule = config.optimizer.schedule
    if schedule.steps is None:
        schedule = schedule.replace(steps=config.steps)
    resolved = config.optimizer.replace(schedule=schedule)
    return resolved, build_optimizer(resolved)


def build_step(config: RunConfig) -> TrainStep:
    """The compiled step; the state it is given is consumed."""
    resolved, optimizer = _optimizer(config)
    step = make_train_step(
        config.model,
        optimizer,
        learning_rate(resolved.schedule),
        accumulation_steps=config.accumulation_steps,
        loss_rows=config.loss_rows,
    )
    return jax.jit(step, donate_argnums=0)


def abstract_state(config: RunConfig) -> TrainState:
    """Shapes and dtypes of the training state; nothing is allocated."""
    return jax.eval_shape(_init(config))


def fresh_state(config: RunConfig) -> TrainState:
    return jax.jit(_init(config))()


def _init(config: RunConfig):
    _, optimizer = _optimizer(config)
    return functools.partial(init_state, config.model, optimizer, config.seed)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of one batch."""
    shape = (config.batch_size, config.data.seq_len)
    kinds = dict.fromkeys(BATCH_FIELDS, "int32") | {"loss_mask": "bool"}
    return {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}
