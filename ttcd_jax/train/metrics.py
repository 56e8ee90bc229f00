"""The metrics of a run besides its loss: functions, by the names in `RunConfig.metrics`. A metric
of the step reads the results of its forward pass; any other is a separate program, run for logged
steps alone. Every loss is the same to the last bit whether a metric is measured or not."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_jax.errors import UserError
from ttcd_jax.memory.distillation import Distillation, summary
from ttcd_jax.models.config import TransformerConfig, layers_with_teacher
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.registry import Registry
from ttcd_jax.train.state import Params, TrainState, with_params
from ttcd_jax.train.step import Batch, Forward, Metrics, TrainStep, in_parts

Measure = Callable[[Params, Batch], Metrics]

# Names of the step's and the reports' own numbers.
RESERVED = (
    *("step", "loss", "grad_norm", "learning_rate", "skipped_steps", "grad_norm_average"),
    *(
        "is_skipped",
        "data_seconds",
        "callback_seconds",
        "data_wait",
        "tokens_per_second",
        "mfu",
        "skipped",
        "rows",
    ),
)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric by its name in configurations and in `metrics.jsonl`.

    `measure(model, batch, num_parts)` returns a number, a vector, or a dict of them: NAME, NAME/0,
    NAME/KEY in `metrics.jsonl`. A step computes the batch in `num_parts` parts (`in_parts`). If the
    metric `is_in_step`, it is `measure(forward)`, for every part; their mean is reported. `check`
    raises `UserError` for a model that has nothing to measure.
    """

    name: str
    measure: Callable[..., Any]
    is_in_step: bool = False
    check: Callable[[TransformerConfig], None] = lambda model: None

    def __post_init__(self) -> None:
        if self.name in RESERVED or not self.name.isidentifier():
            raise UserError(f"a metric cannot be called {self.name!r}: choose another word")


METRICS = Registry[Metric]("metric")
register = METRICS.add


def in_step(names: Sequence[str]) -> Callable[[Forward], Metrics]:
    chosen = [x for x in map(METRICS.named, names) if x.is_in_step]

    def measure(forward: Forward) -> Metrics:
        return {name: x for one in chosen for name, x in _named(one, one.measure(forward)).items()}

    return measure


def programs(names: Sequence[str], model: TransformerConfig, num_parts: int) -> list[Measure]:

    def measure(metric: Metric, params: Params, batch: Batch) -> Metrics:
        return _named(metric, metric.measure(with_params(model, params), batch, num_parts))

    chosen = map(METRICS.named, names)
    return [functools.partial(measure, metric) for metric in chosen if not metric.is_in_step]


def _named(metric: Metric, found: Any) -> Metrics:
    """The numbers that a metric returned, by their names in `metrics.jsonl`."""
    by_key = found if isinstance(found, dict) else {"": found}
    named = {f"{metric.name}/{key}".removesuffix("/"): value for key, value in by_key.items()}
    for name, value in named.items():
        is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
        is_number = is_array or isinstance(value, int | float)
        if not is_number or np.ndim(value) > 1 or not np.isrealobj(value):
            got = f"{value.dtype} {list(value.shape)}" if is_array else repr(value)
            raise UserError(f"metric {name} is {got}: return a number, a vector, or a dict of them")
    return named


def measured(
    step: TrainStep, measures: Sequence[Measure], *, start: int, every: int, last: int
) -> TrainStep:
    """`step`, whose first call takes step `start`. After every `every` steps and step `last` its
    metrics have those of `measures` as well, on the parameters and the batch of the step's loss."""
    count = itertools.count(start + 1)

    def measured_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        done = next(count)
        due = measures if done % every == 0 or done == last else ()
        found = [measure(state["params"], batch) for measure in due]
        state, metrics = step(state, batch)
        return state, metrics | {name: x for one in found for name, x in one.items()}

    return measured_step


def _of_memories(field: str) -> Callable[[Forward], Any]:
    """A field of `MemoryStats` [fast layers], of a model that has it."""
    return lambda forward: {} if (x := getattr(forward.stats, field, None)) is None else x


def distillation(model: Transformer, batch: Batch, num_parts: int) -> Metrics:
    """The measures of `memory.distillation.summary` over the tokens of the batch (segment 0 is
    padding), each named layer_LAYER/MEASURE; a forward pass."""
    layers = layers_with_teacher(model.config)
    read = {name: batch[name] for name in ("tokens", "segment_ids") if name in batch}

    def one_part(part: Batch) -> Distillation:
        return model.distillation(part["tokens"], part.get("segment_ids"))

    parts = in_parts(read, num_parts)
    found = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(len(layers), -1, x.shape[-1]),
        jax.lax.map(one_part, parts),
    )
    ids = parts.get("segment_ids")
    counted = None if ids is None else (ids > 0).reshape(-1, ids.shape[-1])
    return {
        f"layer_{layer}/{name}": value[index]
        for name, value in summary(found, counted).items()
        for index, layer in enumerate(layers)
    }


def _check_teacher(model: TransformerConfig) -> None:
    if not layers_with_teacher(model):
        raise UserError(
            f"RunConfig.metrics has 'distillation', and method {model.method!r} has no student and "
            "teacher to compare; leave it out"
        )


# Measured unless others are chosen: they cost next to nothing.
IN_STEP = ("memory_ratio", "gate_mean", "window_share")
for _name in IN_STEP:
    register(Metric(_name, _of_memories(_name), is_in_step=True))
register(Metric("distillation", distillation, check=_check_teacher))
