"""Changes of a trained model's configuration that keep its parameters: other windows, YaRN."""

from collections.abc import Sequence
from pathlib import Path

from ttcd_jax.errors import UserError
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.run.bindings import read_params, rebound
from ttcd_jax.train.state import abstract_params


def changed_model(config: TransformerConfig, changes: Sequence[str]) -> TransformerConfig:
    """`config` with the bindings `changes`, as in a .gin file, in every configuration of their
    class inside it.

        TransformerConfig.window = 8192
        RopeConfig.yarn = @YarnConfig()
        YarnConfig.factor = 8

    A window, or none, makes a plain transformer one of the other kind (`Method.twin`). Raises
    `UserError` for an unknown name or a wrong value. It names the binding for one that changes the
    parameters or has no effect on the model.
    """
    if not changes:
        return config
    config = config.replace(memory=config.settings)  # settings that are defaults change as well
    changed = rebound(config, changes)
    for binding in read_params(changes, Path.cwd()).values():
        if "init" in binding.field.split("_"):
            drawn = "is for parameters that are drawn, and these are trained"
            raise UserError(f"{binding.where} {drawn}")
    params = abstract_params(config)
    if abstract_params(changed) != params:
        alone = {x: _alone(config, [x]) for x in changes}
        culprits = [x for x, other in alone.items() if other and abstract_params(other) != params]
        raise UserError(
            f"{' and '.join(culprits or changes)} changes shapes, types or names of parameters, "
            "and they are trained: change what only their use depends on, as a window"
        )
    for change in changes:
        without = _alone(config, [other for other in changes if other is not change])
        if without is not None and block_configs(without) == block_configs(changed):
            raise UserError(f"{change} changes nothing that this model computes: leave it out")
    return changed


def describe(changes: Sequence[str]) -> str:
    """The bindings in words, for labels: `window 8192, yarn, factor 8, original_length 4096`."""
    bindings = read_params(changes, Path.cwd()).values()
    names = ((x.field or x.owner, x.value) for x in bindings)
    return ", ".join(x if hasattr(value, "selector") else f"{x} {value}" for x, value in names)


def _alone(config: TransformerConfig, changes: Sequence[str]) -> TransformerConfig | None:
    """`config` with some of the changes; None where they are impossible without the others."""
    try:
        return rebound(config, changes)
    except UserError:
        return None
