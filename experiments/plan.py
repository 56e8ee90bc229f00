"""The dry run: what a configuration costs, before anything is allocated."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from experiments import roofline
from experiments.memory_plan import Memory, remedy
from ttcd_jax.errors import UserError
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig
from ttcd_jax.sharding.collectives import collectives, compile_partitioned
from ttcd_jax.sharding.mesh import build_mesh
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.hardware import Hardware, data_sheet, parse_topology
from ttcd_jax.train.state import abstract_model
from ttcd_jax.units import size as size_text

type Rows = list[tuple[str, str]]


class Plan(NamedTuple):
    """What a step costs each device. `mesh`: devices along each axis; `compiled`: the step itself;
    `text`: the program after partitioning, empty on one device."""

    mesh: dict[str, int]
    memory: Memory
    compiled: jax.stages.Compiled
    text: str


def num_params(config: RunConfig) -> int:
    params = nnx.state(abstract_model(config.model), nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def use_topology(topology: str) -> Hardware:
    """Lets this process's CPU stand for the devices of `topology`; before the first array."""
    hardware, count = parse_topology(topology)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return hardware


def make_plan(config: RunConfig, mesh: Mesh) -> Plan:
    """Compiles the real step for the devices of `mesh`."""
    state, batch = build.abstract_state(config, mesh), build.abstract_batch(config, mesh)
    with jax.set_mesh(mesh):
        lowered = build.build_step(config, mesh).lower(state, batch)
    compiled, text = compile_partitioned(lowered)
    (on_state, on_batch), _ = compiled.input_shardings
    params = _num_bytes(state["params"], on_state["params"])
    # Gradients are as large as the parameters and live among the temporary arrays.
    sizes = compiled.memory_analysis()
    assert sizes is not None, "the compiler knows what its program takes"
    temporary = sizes.temp_size_in_bytes + _num_bytes(batch, on_batch)
    memory = Memory(
        params=params,
        gradients=params,
        optimizer=_num_bytes(state["opt_state"], on_state["opt_state"]),
        rest=max(temporary - params, 0),
    )
    return Plan(dict(mesh.shape), memory, compiled, text)


def _num_bytes(arrays: Any, shardings: Any) -> int:
    """Of one device's parts."""
    sizes = jax.tree.map(
        lambda array, place: math.prod(place.shard_shape(array.shape)) * array.dtype.itemsize,
        arrays,
        shardings,
    )
    return sum(jax.tree.leaves(sizes))


def print_plan(config: RunConfig, hardware: Hardware | None) -> None:
    """Parameters, memory of a device by what holds it, FLOPs and, with a data sheet, collectives
    and time of a step. Compiles the real step for this process's devices. Raises `UserError` for a
    mesh that fits neither them nor the batch."""
    mesh = build_mesh(config.mesh)
    build.placement(config, mesh)
    plan = make_plan(config, mesh)
    hardware = data_sheet(jax.devices()[0].device_kind) if hardware is None else hardware
    rows = _size_rows(config) + _memory_rows(plan.memory) + _state_rows(config)
    if hardware is not None:
        rows += _fit_rows(config, plan, hardware) + _time_rows(config, plan, hardware)
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    if hardware is not None:
        print(_assumptions(hardware))


def _size_rows(config: RunConfig) -> Rows:
    length = config.data.seq_len
    tokens = config.batch_size * length
    return [
        ("parameters", f"{num_params(config):,}"),
        ("tokens per step", f"{tokens:,} ({config.batch_size} rows of {length:,})"),
        ("tokens in all", f"{tokens * config.steps:,} in {config.steps:,} steps"),
        ("training FLOPs per token", f"{training_flops_per_token(config.model, length):.4g}"),
    ]


def _memory_rows(memory: Memory) -> Rows:
    return [
        ("memory: parameters", _per_device(memory.params)),
        ("memory: gradients", _per_device(memory.gradients)),
        ("memory: optimizer", _per_device(memory.optimizer)),
        ("memory: activations and all else", _per_device(memory.rest)),
        ("memory: in all", _per_device(memory.total)),
    ]


def _state_rows(config: RunConfig) -> Rows:
    """What is kept of a row that is read and continued."""
    length = config.data.seq_len
    try:
        sizes = state_bytes(config.model, 1, max_length=length)
    except UserError as error:
        return [("state of inference", f"none: {error}")]
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in sizes.items() if size)
    extent = f", for {length:,} tokens" if config.model.window is None else ", for any length"
    return [("state of inference", f"per row: {kinds}{extent}")]


def _fit_rows(config: RunConfig, plan: Plan, hardware: Hardware) -> Rows:
    change = remedy(config, plan.mesh, plan.memory, hardware)
    axes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    rows = [
        ("devices", f"{math.prod(plan.mesh.values())} x {hardware.name}: {axes}"),
        ("memory: there is", _per_device(hardware.memory_bytes)),
    ]
    if change is None:
        return [*rows, ("fits", "yes")]
    return [*rows, ("fits", "DOES NOT FIT"), ("change", change)]


def _time_rows(config: RunConfig, plan: Plan, hardware: Hardware) -> Rows:
    found = collectives(plan.text, plan.mesh) if plan.text else []
    sent = roofline.traffic(found, plan.mesh, hardware)
    num_devices = math.prod(plan.mesh.values())
    tokens, length = config.batch_size * config.data.seq_len, config.data.seq_len
    flops = tokens * training_flops_per_token(config.model, length) / num_devices
    time = roofline.step_time(
        flops=flops,
        remat=config.model.remat,
        sent=sent,
        optimizer_bytes=plan.memory.lasting,
        hardware=hardware,
    )
    return [
        *(_traffic_row(one) for one in sent),
        ("time: products", _seconds(time.products)),
        ("time: traffic, hidden", _seconds(time.hidden)),
        ("time: traffic, exposed", _seconds(time.exposed)),
        ("time: optimizer", _seconds(time.optimizer)),
        ("time: step", f"{_seconds(time.total)}, {tokens / time.total:,.0f} tokens per second"),
        ("time: all steps", f"{time.total * config.steps / 3600:,.1f} hours"),
        ("MFU", f"{flops / (time.total * hardware.peak_flops):.1%}"),
    ]


def _assumptions(hardware: Hardware) -> str:
    sheet = (
        f"{hardware.name}: {hardware.peak_flops / 1e12:,.0f} TFLOP/s dense bfloat16, "
        f"{size_text(hardware.memory_bytes)} at {hardware.memory_bandwidth / 1e12:.2f} TB/s, "
        f"{hardware.link_bandwidth / 1e9:.0f} GB/s each way to the {hardware.devices_per_node} of "
        f"a node, {hardware.network_bandwidth / 1e9:.0f} GB/s to other nodes"
    )
    memory = (
        "activations as this machine's compiler plans them: a CPU computes some bfloat16 products "
        "in float32 and has attention in XLA"
    )
    lines = (sheet, memory, *roofline.ASSUMPTIONS)
    return "\nassumed:\n" + "\n".join(f"  {line}" for line in lines)


def _traffic_row(one: roofline.Traffic) -> tuple[str, str]:
    how = "exposed" if one.is_exposed else "hidden"
    sent = f"{one.count:,} times, {size_text(one.num_bytes)}, {_seconds(one.seconds)} {how}"
    return f"sent: {one.kind} along {' x '.join(one.axes)}", sent


def _per_device(size: float) -> str:
    return f"{size_text(size)} per device"


def _seconds(time: float) -> str:
    return f"{time:.3f} s" if time >= 1 else f"{time * 1e3:.2f} ms"
