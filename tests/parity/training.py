"""Checks of training: parameters after optimizer steps, learning rates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.parity.golden import BFLOAT16_MUON, Comparison, Golden, worse, worst
from ttcd_jax.errors import DataError
from ttcd_jax.train.muon import Axes, group_of
from ttcd_jax.train.optimizer import (
    MuonSettings,
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    global_norm,
    learning_rate,
)


def check_optimizer(golden: Golden, dtype: str) -> Comparison:
    """Kind optimizer: parameters after every step; with Muon also at the published precision."""
    axes = {name: _axes(name, x.shape) for name, x in golden.group("param.").items()}
    config = _optimizer_config(golden, axes)
    after, norms = _run(golden, _in(config, dtype), axes, dtype)
    ours: dict[str, Any] = {f"out.{name}": value for name, value in after.items()}
    if "out.grad_norm" in golden.arrays:
        ours["out.grad_norm"] = norms
    result = worst(ours, golden, dtype)
    rounded = golden.group("out_bf16.")
    if not rounded:
        return result
    with jax.enable_x64(False):  # the same program for either `dtype`, compiled once
        after, _ = _run(golden, _in(config, "bfloat16"), axes, "float32")
    for name, theirs in rounded.items():
        change = np.linalg.norm(theirs[-1] - golden.arrays[f"param.{name}"])
        distance = float(np.linalg.norm(after[name][-1] - theirs[-1]) / change)
        result = worse(result, Comparison(f"out_bf16.{name}", distance, BFLOAT16_MUON))
    return result


def _axes(name: str, shape: tuple[int, ...]) -> Axes:
    """Axis names of a tensor; those on the vocabulary axis are chosen as in the reference."""
    if len(shape) == 1:
        return ("embed",)
    if len(shape) == 3:
        return ("mlp", "layers", "taps") if shape[1] == 1 else ("layers", "mlp", "embed")
    if any(part in name for part in ("embeddings", "lm_head", "model.norm")):
        return ("vocab", "embed")
    return ("mlp", "embed")


def _optimizer_config(golden: Golden, axes: dict[str, Axes]) -> OptimizerConfig:
    source = golden.config
    fields = {name: source[name] for name in ("beta1", "beta2", "eps", "weight_decay")}
    fields["clip_norm"] = source.get("clip_norm")
    if "muon_params" not in golden.info:
        return OptimizerConfig(**fields)
    ours = {name for name, names in axes.items() if group_of(names) == "muon"}
    if ours != set(golden.info["muon_params"]):
        differing = sorted(ours ^ set(golden.info["muon_params"]))
        raise DataError(f"Muon is given other tensors than the reference's: {', '.join(differing)}")
    muon = MuonSettings(momentum=source["momentum"], is_nesterov=source["nesterov"])
    return OptimizerConfig(kind="muon", settings=muon, **fields)


def _in(config: OptimizerConfig, dtype: str) -> OptimizerConfig:
    """`config` with Newton-Schulz, if it has any, in `dtype`."""
    muon = config.settings
    return (
        config if muon is None else config.replace(settings=muon.replace(orthogonalization=dtype))
    )


def _run(
    golden: Golden, config: OptimizerConfig, axes: dict[str, Axes], dtype: str
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(parameters after every step [steps, ...], gradient norms [steps])."""
    rates = jnp.asarray(golden.arrays["in.lr"], dtype)
    optimizer = build_optimizer(config, lambda step: rates[step], axes)
    params = {name: jnp.asarray(x, dtype) for name, x in golden.group("param.").items()}
    grads = {name: jnp.asarray(x, dtype) for name, x in golden.group("in.grad.").items()}

    def step(carry: tuple[Any, Any], grads: Any) -> tuple[tuple[Any, Any], tuple[Any, jax.Array]]:
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        params: Any = optax.apply_updates(params, updates)
        return (params, state), (params, global_norm(grads))

    _, (after, norms) = jax.lax.scan(step, (params, optimizer.init(params)), grads)
    return {name: np.asarray(value) for name, value in after.items()}, np.asarray(norms)


def check_schedule(golden: Golden, dtype: str) -> Comparison:
    """Kind lr_schedule: the rate of every step of every case."""
    ours = {}
    for case, source in golden.config.items():
        rates = jax.jit(jax.vmap(learning_rate(schedule_of(source))))
        ours[f"out.{case}"] = rates(jnp.arange(source["steps"]))
    return worst(ours, golden, dtype)


def schedule_of(source: dict[str, Any]) -> ScheduleConfig:
    floor = source.get("lr_min", 0.0)
    if "lr_min_absolute" in source:
        floor = min(1.0, source["lr_min_absolute"] / source["lr"])
    same = {name: source[name] for name in ("steps", "warmup", "decay_ratio")}
    return ScheduleConfig(peak=source["lr"], decay=source["decay_type"], floor_ratio=floor, **same)
