"""The distances between student, memory and teacher on the batches of a run, as metrics.

They come from a program of their own, so that the program of a step, and with it every loss, is the
same to the last bit whether they are logged or not.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ttcd_jax.memory.distillation import Distillation, summary
from ttcd_jax.models.config import TransformerConfig, layers_with_teacher
from ttcd_jax.train.state import TrainState, with_params
from ttcd_jax.train.step import Batch, Metrics, TrainStep, in_parts

Measure = Callable[[Any, Batch], Metrics]  # of parameters and batch


def make_distillation(config: TransformerConfig, num_parts: int) -> Measure:
    """The measures of `memory.distillation.summary` over the tokens of the
    batch (segment 0 is padding), each named distillation/layer_LAYER/MEASURE; a forward pass,
    computed in `num_parts` parts."""
    layers = layers_with_teacher(config)

    def distillation(params: Any, batch: Batch) -> Metrics:
        model = with_params(config, params)
        read = {name: batch[name] for name in ("tokens", "segment_ids") if name in batch}

        def one_part(part: Batch) -> Distillation:
            return model.distillation(part["tokens"], part.get("segment_ids"))

        parts = in_parts(read, num_parts)
        found = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 1).reshape(len(layers), -1, x.shape[-1]),
            jax.lax.map(one_part, parts),
        )
        counted = None
        if "segment_ids" in parts:
            counted = (parts["segment_ids"] > 0).reshape(-1, parts["segment_ids"].shape[-1])
        return {
            f"distillation/layer_{layer}/{name}": value[index]
            for name, value in summary(found, counted).items()
            for index, layer in enumerate(layers)
        }

    return distillation


def measured(
    step: TrainStep, measure: Measure, *, start: int, is_due: Callable[[int], bool]
) -> TrainStep:
    """`step`, whose first call takes step `start`. Where `is_due(steps done)` its metrics have
    those of `measure` as well, on the parameters and the batch of the step's loss."""
    count = itertools.count(start + 1)

    def measured_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        found = measure(state["params"], batch) if is_due(next(count)) else {}
        state, metrics = step(state, batch)
        return state, metrics | found

    return measured_step
