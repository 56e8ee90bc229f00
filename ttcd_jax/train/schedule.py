"""The learning rate of a step: linear warm-up, a plateau, then a decay to a floor."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from ttcd_jax.config import Config, Fraction, NonNegative, Positive, PositiveFloat

_DECAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - jnp.sqrt(progress),
    "cosine": lambda progress: (1 + jnp.cos(jnp.pi * progress)) / 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """`steps` None: the length of the run. `decay_ratio`: the share of `steps` spent decaying to
    `floor_ratio * peak` (warm-up, stable, decay); None decays from the end of the warm-up."""

    peak: PositiveFloat = 3e-4
    steps: Positive | None = None
    warmup: NonNegative = 50
    decay_ratio: Fraction | None = None
    decay: Literal["linear", "sqrt", "cosine"] = "cosine"
    floor_ratio: Fraction = 0.1


def learning_rate(config: ScheduleConfig) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The rate of step s = 0, 1, ... as a traceable function of s.

    With `warmup` clipped to `steps` and `p = (s + 1 - warmup - stable) / decay`, the factor of
    `peak` is `(s + 1) / warmup` during warm-up, 1 while p <= 0, then `floor + (1 - floor) f(p)`
    with f falling from 1 to 0. `stable = steps + 1 - warmup - decay` is one step more than remain,
    so the floor is first reached at s = `steps`, after the run's last step.
    """
    assert config.steps is not None, "the run's length fills ScheduleConfig.steps in"
    warmup = min(config.warmup, config.steps)
    decay = config.steps - warmup
    if config.decay_ratio is not None:
        decay = min(round(config.steps * config.decay_ratio), decay)
    stable = config.steps + 1 - warmup - decay
    fall = _DECAYS[config.decay]

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        position = jnp.asarray(step, dtype=float) + 1
        progress = jnp.clip((position - warmup - stable) / max(decay, 1), 0, 1)
        decayed = config.floor_ratio + (1 - config.floor_ratio) * fall(progress)
        return config.peak * jnp.where(position <= warmup, position / max(warmup, 1), decayed)

    return rate
