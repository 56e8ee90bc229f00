"""The dry run: what a configuration costs, before anything is allocated."""

import math

import jax
from flax import nnx

from experiments import build
from experiments.run_config import RunConfig
from ttcd_jax.sharding.mesh import build_mesh
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.state import abstract_model


def num_params(config: RunConfig) -> int:
    params = nnx.state(abstract_model(config.model), nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _num_bytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def print_plan(config: RunConfig) -> None:
    """Parameters, memory per device by what holds it, FLOPs per token. Compiles the real step for
    this machine's device; activations on another device may differ."""
    mesh = build_mesh(config.mesh)
    build.placement(config, mesh)
    state, length = build.abstract_state(config, mesh), config.data.seq_len
    batch = build.abstract_batch(config, mesh)
    with jax.set_mesh(mesh):
        memory = build.build_step(config, mesh).lower(state, batch).compile()
    sizes = memory.memory_analysis()
    tokens = config.batch_size * length
    rows = [
        ("parameters", f"{num_params(config):,}"),
        ("tokens per step", f"{tokens:,} ({config.batch_size} rows of {length:,})"),
        ("tokens in all", f"{tokens * config.steps:,} in {config.steps:,} steps"),
        ("training FLOPs per token", f"{training_flops_per_token(config.model, length):.4g}"),
        ("memory: parameters", _gigabytes(_num_bytes(state["params"]))),
        ("memory: optimizer", _gigabytes(_num_bytes(state["opt_state"]))),
        ("memory: activations, gradients", _gigabytes(sizes.temp_size_in_bytes)),
        ("device", f"{jax.device_count()} x {jax.devices()[0].device_kind}"),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3f} GB per device"
