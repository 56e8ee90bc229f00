"""The optimizer: one global gradient clip, the direction of AdamW, Muon or your own, weight decay
on every tensor; and its learning rate: linear warm-up, a plateau, then a decay to a floor."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from ttcd_jax import config as configs
from ttcd_jax.errors import UserError
from ttcd_jax.registry import Registry
from ttcd_jax.train.muon import AxesTree, orthogonalization, parameter_groups
from ttcd_jax.train.state import Params

_DECAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - jnp.sqrt(progress),
    "cosine": lambda progress: (1 + jnp.cos(jnp.pi * progress)) / 2,
}


class ScheduleConfig(configs.Config):
    """The rate grows to `peak` in `warmup` steps and falls by the curve `decay` to
    `floor_ratio` of it. `steps` None: the length of the run. `decay_ratio`: the share of `steps`
    spent decaying (warm-up, stable, decay); None decays from the end of the warm-up."""

    peak: configs.PositiveFloat = 3e-4
    steps: configs.Positive | None = None
    warmup: configs.NonNegative = 50
    decay_ratio: configs.Fraction | None = None
    decay: Literal["linear", "sqrt", "cosine"] = "cosine"
    floor_ratio: configs.Fraction = 0.1


def learning_rate(config: ScheduleConfig) -> Callable[[ArrayLike], Float[Array, ""]]:
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

    def rate(step: ArrayLike) -> Float[Array, ""]:
        position = jnp.asarray(step, dtype=float) + 1
        progress = jnp.clip((position - warmup - stable) / max(decay, 1), 0, 1)
        decayed = config.floor_ratio + (1 - config.floor_ratio) * fall(progress)
        return config.peak * jnp.where(position <= warmup, position / max(warmup, 1), decayed)

    return rate


Rates = tuple[tuple[str, configs.NonNegativeFloat], ...]


class OptimizerSettings(configs.Config):
    """Base of the constants of optimizers, the type of `OptimizerConfig.settings`."""


class MuonSettings(OptimizerSettings):
    """Constants of `train.muon`: its `momentum`, whether the step looks ahead along it
    (`is_nesterov`), and the dtype of Newton-Schulz, `orthogonalization`; not float16, in which a
    small momentum underflows before it is normalised."""

    momentum: configs.Decay = 0.95
    is_nesterov: bool = True
    orthogonalization: Literal["float64", "float32", "bfloat16"] = "bfloat16"


class OptimizerConfig(configs.Config):
    """AdamW's decay rates `beta1` and `beta2` of its moments and `eps`; `weight_decay` per unit of
    learning rate, the `schedule` of that rate, and `clip_norm`, the largest norm of a gradient
    (None: any). `kind` names a registered optimizer, `settings` its own constants (None: their
    defaults). With "muon", matrices follow `train.muon`; all else follows AdamW.

    `rates`: pairs (pattern, factor), `(("layers/*/mlp/proj", 0.1),)`. A parameter's learning rate,
    its weight decay too, is multiplied by the factor of the first pattern that matches its name on
    disk, by 1 if none does. A factor of 0 freezes it: it stays bit for bit, has no part in
    the gradient norm, and no moments unless a layer in its stack of equal layers is trained.
    """

    kind: str = "adamw"
    settings: OptimizerSettings | None = None
    beta1: configs.Decay = 0.9
    beta2: configs.Decay = 0.95
    eps: configs.PositiveFloat = 1e-8
    weight_decay: configs.NonNegativeFloat = 0.1
    clip_norm: configs.PositiveFloat | None = 1.0
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    rates: Rates = ()

    @property
    def constants(self) -> OptimizerSettings | None:
        """The settings, the defaults of the optimizer unless bound; None for one without."""
        defaults = OPTIMIZERS.named(self.kind).settings
        return self.settings or (defaults and defaults())

    def validate(self) -> None:
        known = OPTIMIZERS.named(self.kind).settings
        if self.settings is not None and type(self.settings) is not known:
            raise UserError(
                f"optimizer {self.kind!r} has no settings {type(self.settings).__name__}: set "
                f"OptimizerConfig.settings = {known and f'@{known.__name__}()'}"
            )


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer by its name in `OptimizerConfig.kind`.

    `directions(config, settings, axes)` maps gradients to the directions of steps: by the name of a
    group of parameters an Optax transformation without learning rate, weight decay and clip. `axes`
    is the tree that `build_optimizer` takes; `groups(axes)` the tree of the groups' names.
    """

    name: str
    directions: Callable[[OptimizerConfig, Any, AxesTree], dict[str, optax.GradientTransformation]]
    groups: Callable[[AxesTree], Any] | None = None
    settings: type[OptimizerSettings] | None = None


OPTIMIZERS = Registry[Optimizer]("optimizer", lambda x: x.settings, OptimizerSettings)
register = OPTIMIZERS.add


def global_norm(tree: PyTree[Float[Array, "..."]]) -> Float[Array, ""]:
    """The Euclidean norm of all leaves together; squares are summed in float32 or wider."""
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))))
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Gradients times `min(1, max_norm / (norm + 1e-6))`, one norm over all tensors, as in PyTorch;
    Optax's clip has no 1e-6."""

    def update(updates: Any, _: Any) -> Any:
        scale = jnp.minimum(1.0, max_norm / (global_norm(updates) + 1e-6))
        return jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype), updates)

    return optax.stateless(update)


def build_optimizer(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    axes: AxesTree,
    weight_decay: Float[Array, ""] | float | None = None,
    factors: Params | None = None,
) -> optax.GradientTransformation:
    """The optimizer of `config` with the rate `schedule(step)`, the first step being 0.
    `weight_decay` replaces that of `config`; both may be traced.

    `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`, then
    `p <- p (1 - rate * weight_decay) - rate * mhat / (sqrt(vhat) + eps)`;
    with Muon a matrix has another direction (`train.muon`) and the same rate and decay.
    `axes`: `train.state.logical_axes` of the model. `factors` of the rate of every parameter:
    `train.groups.rate_factors` of `config.rates`; frozen ones have no moments.
    """

    def scaled(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda leaf, x: (leaf * x).astype(leaf.dtype), updates, factors)

    kind = OPTIMIZERS.named(config.kind)
    settings = config.constants
    directions: dict[Hashable, optax.GradientTransformation] = {
        **kind.directions(config, settings, axes)
    }
    (first, *others) = directions
    assert kind.groups or not others, f"optimizer {kind.name!r} has several groups: give `groups`"
    groups = kind.groups(axes) if kind.groups else jax.tree.map(lambda _: first, factors)
    if factors is not None:
        directions["frozen"] = optax.set_to_zero()
        groups = jax.tree.map(lambda x, group: group if np.any(x) else "frozen", factors, groups)
    update = optax.chain(
        directions[first] if len(directions) == 1 else optax.partition(directions, groups),
        optax.add_decayed_weights(config.weight_decay if weight_decay is None else weight_decay),
        optax.scale_by_learning_rate(schedule),
        optax.identity() if factors is None else optax.stateless(scaled),
    )
    if config.clip_norm is None:
        return update
    return optax.chain(clip_by_global_norm(config.clip_norm), update)


def _adam(config: OptimizerConfig, *_: Any) -> dict[str, optax.GradientTransformation]:
    return {"adamw": optax.scale_by_adam(config.beta1, config.beta2, config.eps)}


def _muon(
    config: OptimizerConfig, settings: MuonSettings, axes: AxesTree
) -> dict[str, optax.GradientTransformation]:
    momentum = optax.trace(settings.momentum, nesterov=settings.is_nesterov)  # in the dtype of p
    direction = orthogonalization(axes, settings.orthogonalization)
    return _adam(config) | {"muon": optax.chain(momentum, direction)}


register(Optimizer("adamw", _adam))
register(Optimizer("muon", _muon, groups=parameter_groups, settings=MuonSettings))
