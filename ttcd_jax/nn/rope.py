"""Rotary position embedding, half-split layout, with the scalings that models use.

For a head vector a = [a0 | a1] at position p: [a0 cos - a1 sin | a1 cos + a0 sin], angle p *
base^(-2j/H). Angles are float32: positions up to a million need it.
"""

import math
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ttcd_jax.config import AtLeast, Bound, Config, Positive, PositiveFloat
from ttcd_jax.errors import UserError


class _ByTurns(Config):
    """Pairs that turn fewer than `slow_turns` times over the `original_length`, in tokens, are
    interpolated by `factor`, those above `fast_turns` are kept."""

    factor: Annotated[float, AtLeast(1)]
    original_length: Positive
    fast_turns: PositiveFloat = 32.0
    slow_turns: PositiveFloat = 1.0

    def validate(self) -> None:
        if not self.fast_turns > self.slow_turns:
            raise UserError(
                f"fast_turns {self.fast_turns} must be more than slow_turns {self.slow_turns}"
            )


class YarnConfig(_ByTurns):
    """YaRN (Peng et al. 2023) as Hugging Face applies it: a linear ramp between the two; cos and
    sin are multiplied by `magnitude`, None: 0.1 ln(factor) + 1."""

    magnitude: PositiveFloat | None = None


class Llama3Config(_ByTurns):
    """The scaling of Llama 3.1: in between the share that is kept grows linearly with the turns."""

    fast_turns: PositiveFloat = 4.0


class RopeConfig(Config):
    """`base`: theta in the equation of the angles. `linear_factor` divides all positions (linear
    interpolation); it, `yarn` and `llama3` exclude one another."""

    base: Annotated[float, Bound("greater than 1", lambda base: base > 1)] = 10_000.0
    yarn: YarnConfig | None = None
    llama3: Llama3Config | None = None
    linear_factor: PositiveFloat = 1.0

    def validate(self) -> None:
        ways = {"yarn": self.yarn, "llama3": self.llama3, "linear_factor": self.linear_factor != 1}
        if len(names := [name for name, way in ways.items() if way]) > 1:
            names = " and ".join(names)
            raise UserError(f"RopeConfig has {names}: take one way to scale the positions")


def pair_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """(radians per position of each of the H/2 pairs, factor on cos and sin)."""
    frequency = 1.0 / config.base ** (np.arange(0, head_dim, 2) / head_dim)
    magnitude, kept, factor = 1.0, np.zeros(head_dim // 2), config.linear_factor
    if (llama3 := config.llama3) is not None:
        turns = llama3.original_length * frequency / (2 * math.pi)
        kept = (turns - llama3.slow_turns) / (llama3.fast_turns - llama3.slow_turns)
        factor = llama3.factor
    if (yarn := config.yarn) is not None:

        def pair_with_turns(turns: float) -> float:
            length = yarn.original_length / (turns * 2 * math.pi)
            return head_dim * math.log(length) / (2 * math.log(config.base))

        low = max(math.floor(pair_with_turns(yarn.fast_turns)), 0)
        high = min(math.ceil(pair_with_turns(yarn.slow_turns)), head_dim - 1)
        kept = 1 - (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
        factor, magnitude = yarn.factor, yarn.magnitude or 0.1 * math.log(yarn.factor) + 1.0
    kept = np.clip(kept, 0, 1)
    frequency = frequency * kept + frequency / factor * (1 - kept)
    return frequency.astype(np.float32), magnitude


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], config: RopeConfig
) -> Float[Array, "B T N H"]:
    """x with every head rotated by its token's position."""
    frequency, magnitude = pair_frequencies(config, x.shape[-1])
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = (magnitude * f(angle).astype(wide) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
