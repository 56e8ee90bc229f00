"""The dry run: the cost of a configuration before anything is allocated, and the changes that make
a step fit."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from ttcd_jax.errors import UserError
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.models.config import memory_chunk
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.layout import num_parts, run_mesh
from ttcd_jax.sharding.mesh import MeshConfig
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.hardware import Hardware, data_sheet, parse_topology
from ttcd_jax.train.state import abstract_model
from ttcd_jax.units import size as size_text

type Rows = list[tuple[str, str]]

PEAK_SHARE = 0.4  # of the data sheet's peak FLOP/s, for the time of the FLOPs


class Memory(NamedTuple):
    """Bytes on one device. `rest`: activations and everything else that exists during a step."""

    params: int
    gradients: int
    optimizer: int
    rest: int

    @property
    def lasting(self) -> int:
        """Bytes that a smaller batch does not reduce."""
        return self.params + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.lasting + self.rest


class Plan(NamedTuple):
    """Cost of a step per device. `mesh`: devices along each axis; `compiled`: the step itself."""

    mesh: dict[str, int]
    memory: Memory
    compiled: jax.stages.Compiled


def num_params(config: RunConfig) -> int:
    params = nnx.state(abstract_model(config.model), nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def use_topology(topology: str) -> Hardware:
    """Makes this process's CPU as many devices as `topology` has; before the first array."""
    hardware, count = parse_topology(topology)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return hardware


def make_plan(config: RunConfig, mesh: Mesh) -> Plan:
    """Compiles the real step for the devices of `mesh`."""
    state, batch = build.abstract_state(config, mesh), build.abstract_batch(config, mesh)
    with jax.set_mesh(mesh):
        compiled = build.build_step(config, mesh).lower(state, batch).compile()
    params = _num_bytes(state["params"])
    # Gradients are as large as the parameters, and part of the temporary arrays.
    sizes = compiled.memory_analysis()
    assert sizes is not None, "the compiler reports the bytes of its program"
    temporary = sizes.temp_size_in_bytes + _num_bytes(batch)
    memory = Memory(
        params=params,
        gradients=params,
        optimizer=_num_bytes(state["opt_state"]),
        rest=max(temporary - params, 0),
    )
    return Plan(dict(mesh.shape), memory, compiled)


def _num_bytes(arrays: Any) -> int:
    """Bytes of one device's shards."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def print_plan(config: RunConfig, hardware: Hardware | None) -> None:
    """Prints parameters, bytes on a device by use, FLOPs and, with a data sheet, whether the step
    fits, the changes that make it fit, and the time of its FLOPs at a share of the peak. Compiles
    the real step for this process's devices. Raises `UserError` for a mesh that does not fit them
    or the batch."""
    mesh = run_mesh(config)
    build.placement(config, mesh)
    plan = make_plan(config, mesh)
    hardware = data_sheet(jax.devices()[0].device_kind) if hardware is None else hardware
    rows = _size_rows(config) + _memory_rows(plan.memory) + _state_rows(config)
    rows += [("layout", _layout(config, mesh))]
    if hardware is not None:
        rows += _fit_rows(config, plan, hardware)
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def _layout(config: RunConfig, mesh: Mesh) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    parts = num_parts(config, mesh)
    return f"mesh {axes}; the batch in {parts} parts; remat {config.model.remat!r}"


def _size_rows(config: RunConfig) -> Rows:
    length = config.data.seq_len
    tokens, flops = config.batch_size * length, training_flops_per_token(config.model, length)
    return [
        ("parameters", f"{num_params(config):,}"),
        ("tokens per step", f"{tokens:,} ({config.batch_size} rows of {length:,})"),
        ("tokens in all", f"{tokens * config.steps:,} in {config.steps:,} steps"),
        ("training FLOPs per token", f"{flops:.4g}"),
        ("training FLOPs per step", f"{flops * tokens:.4g}"),
    ]


def _memory_rows(memory: Memory) -> Rows:
    return [
        ("memory: parameters", _per_device(memory.params)),
        ("memory: gradients", _per_device(memory.gradients)),
        ("memory: optimizer", _per_device(memory.optimizer)),
        ("memory: activations and all else", f"{_per_device(memory.rest)}, as compiled here"),
        ("memory: in all", _per_device(memory.total)),
    ]


def _state_rows(config: RunConfig) -> Rows:
    length = config.data.seq_len
    try:
        sizes = state_bytes(config.model, 1, max_length=length)
    except UserError as error:
        return [("decoding state", f"none: {error}")]
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in sizes.items() if size)
    grows = config.model.window is None and sizes.get("attention")
    extent = f", for {length:,} tokens" if grows else ", for any length"
    return [("decoding state", f"per row: {kinds}{extent}")]


def _fit_rows(config: RunConfig, plan: Plan, hardware: Hardware) -> Rows:
    changes = changes_to_fit(config, plan, hardware)
    num_devices, memory = math.prod(plan.mesh.values()), hardware.memory_bytes
    # A CPU's compiler computes some bfloat16 products in float32 and has attention in XLA.
    fits = "yes" if plan.memory.total <= memory else "DOES NOT FIT"
    lines = [f"{x.param}  ({size_text(x.total)} per device; {x.cost})" for x in changes]
    if fits != "yes" and (not changes or changes[-1].total > memory):
        lines.append(
            f"more devices than {num_devices}, or rows shorter than {config.data.seq_len:,} tokens"
        )
    length = config.data.seq_len
    flops = config.batch_size * length * training_flops_per_token(config.model, length)
    seconds = flops / (num_devices * PEAK_SHARE * hardware.peak_flops)
    step = f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
    return [
        ("devices", f"{num_devices} x {hardware.name} of {size_text(memory)}"),
        ("fits", fits),
        *(("change" if n == 0 else "  and", line) for n, line in enumerate(lines)),
        (
            f"FLOPs at {PEAK_SHARE:.0%} of peak",
            f"{step} per step, {seconds * config.steps / 3600:,.1f} hours in all "
            f"(arithmetic, no prediction; peak {hardware.peak_flops / 1e12:,.0f} TFLOP/s)",
        ),
    ]


def _per_device(size: float) -> str:
    return f"{size_text(size)} per device"


class Change(NamedTuple):
    """Bindings that make a step smaller, its bytes on a device with them and those before, and
    their cost."""

    param: str
    total: int
    cost: str


def changes_to_fit(config: RunConfig, plan: Plan, hardware: Hardware) -> list[Change]:
    """The changes that make a step fit, the cheapest first, each on top of those before it and
    compiled; empty if it fits. If the last one still does not fit, no layout of these devices
    does."""
    changes: list[Change] = []
    devices = jax.devices()[: math.prod(plan.mesh.values())]
    kinds = [_shard_parameters, _shrink_parts, _recompute, *[_shard_rows] * len(devices)]
    for kind in kinds:
        if plan.memory.total <= hardware.memory_bytes:
            break
        proposal = kind(config, plan, hardware)
        if proposal is None:
            continue
        param, cost, changed = proposal
        smaller = make_plan(changed, run_mesh(changed, devices))
        if smaller.memory.total < plan.memory.total:
            config, plan = changed, smaller
            changes.append(Change(param, plan.memory.total, cost))
    return changes


type _Proposal = tuple[str, str, RunConfig] | None


def _shard_parameters(config: RunConfig, plan: Plan, hardware: Hardware) -> _Proposal:
    mesh = plan.mesh
    if plan.memory.lasting <= hardware.memory_bytes or mesh["data"] == 1:
        return None
    changed = mesh | {"data": 1, "fsdp": mesh["fsdp"] * mesh["data"]}
    param, config = _on_mesh(config, changed)
    return param, "parameters are gathered from more devices", config


def _shrink_parts(config: RunConfig, plan: Plan, hardware: Hardware) -> _Proposal:
    parts = config.batch_size // (plan.mesh["data"] * plan.mesh["fsdp"])
    changed = config.replace(accumulation_steps=parts)
    return f"RunConfig.accumulation_steps={parts}", "smaller products, the same FLOPs", changed


def _recompute(config: RunConfig, plan: Plan, hardware: Hardware) -> _Proposal:
    if config.model.remat not in ("none", "dots"):
        return None
    changed = config.replace(model=config.model.replace(remat="block"))
    return "TransformerConfig.remat='block'", "blocks run forward twice: 4/3 of the FLOPs", changed


def _shard_rows(config: RunConfig, plan: Plan, hardware: Hardware) -> _Proposal:
    mesh = plan.mesh
    axis = next((name for name in ("fsdp", "data") if mesh[name] % 2 == 0), None)
    chunk = memory_chunk(config.model) or 1
    if axis is None or config.data.seq_len % (2 * mesh["seq"] * chunk):
        return None
    changed = mesh | {axis: mesh[axis] // 2, "seq": 2 * mesh["seq"]}
    parts = config.batch_size // (changed["data"] * changed["fsdp"])
    param, config = _on_mesh(config.replace(accumulation_steps=parts), changed)
    param = f"RunConfig.accumulation_steps={parts} {param}"
    return param, "neighbors exchange keys and states; more, smaller parts", config


def _on_mesh(config: RunConfig, mesh: Mapping[str, int]) -> tuple[str, RunConfig]:
    sizes = " ".join(f"MeshConfig.{name}={size}" for name, size in mesh.items())
    changed = (config.mesh or MeshConfig()).replace(**mesh)
    return f"RunConfig.mesh=@MeshConfig() {sizes}", config.replace(mesh=changed)
