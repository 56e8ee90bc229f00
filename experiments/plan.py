"""The dry run: the cost of a configuration before anything is allocated, and the change that makes
a step fit."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ttcd_jax.errors import UserError
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig
from ttcd_jax.sharding.mesh import build_mesh
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.hardware import DEVICES_PER_NODE, Hardware, data_sheet, parse_topology
from ttcd_jax.train.state import abstract_params
from ttcd_jax.units import size as size_text

PEAK_SHARE = 0.4  # of the data sheet's peak FLOP/s, for the time of the FLOPs


class DeviceMemory(NamedTuple):
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


def num_params(config: RunConfig) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(config.model)))


def use_topology(topology: str) -> Hardware:
    """Makes this process's CPU as many devices as `topology` has; before the first array."""
    hardware, count = parse_topology(topology)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return hardware


def make_plan(config: RunConfig, mesh: Mesh) -> tuple[DeviceMemory, jax.stages.Compiled]:
    """(bytes of a step on one device of `mesh`, the real step, compiled)."""
    state, batch = build.abstract_state(config, mesh), build.abstract_batch(config, mesh)
    with jax.set_mesh(mesh):
        compiled = build.build_step(config, mesh).lower(state, batch).compile()
    (on_state, on_batch), _ = compiled.input_shardings
    params = _num_bytes(state["params"], on_state["params"])
    # Gradients are as large as the parameters, and part of the temporary arrays.
    sizes = compiled.memory_analysis()
    assert sizes is not None, "the compiler reports the bytes of its program"
    temporary = sizes.temp_size_in_bytes + _num_bytes(batch, on_batch)
    optimizer = _num_bytes(state["opt_state"], on_state["opt_state"])
    return DeviceMemory(params, params, optimizer, rest=max(temporary - params, 0)), compiled


def _num_bytes(arrays: Any, shardings: Any) -> int:
    """Bytes of one device's shards."""

    def size(array: Any, sharding: Any) -> int:
        return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, arrays, shardings)))


def print_plan(config: RunConfig, hardware: Hardware | None) -> None:
    """Prints parameters, bytes on a device by use, FLOPs and, with a data sheet, whether the step
    fits and the time of its FLOPs at a share of the peak. Compiles the real step for this process's
    devices. Raises `UserError` for a mesh that does not fit them or the batch."""
    mesh = build_mesh(config.mesh)
    build.placement(config, mesh)
    used, _ = make_plan(config, mesh)
    hardware = data_sheet(jax.devices()[0].device_kind) if hardware is None else hardware
    length = config.data.seq_len
    tokens, flops = config.batch_size * length, training_flops_per_token(config.model, length)
    facts = {
        "parameters": f"{num_params(config):,}",
        "tokens per step": f"{tokens:,} ({config.batch_size} rows of {length:,})",
        "tokens in all": f"{tokens * config.steps:,} in {config.steps:,} steps",
        "training FLOPs per token": f"{flops:.4g}",
        "training FLOPs per step": f"{flops * tokens:.4g}",
        "memory: parameters": _per_device(used.params),
        "memory: gradients": _per_device(used.gradients),
        "memory: optimizer": _per_device(used.optimizer),
        "memory: activations and all else": f"{_per_device(used.rest)}, as compiled here",
        "memory: in all": _per_device(used.total),
        "decoding state": _decoding_state(config),
    }
    if hardware is not None:
        facts |= _fit(config, mesh.shape, used, hardware, flops * tokens)
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))


def _decoding_state(config: RunConfig) -> str:
    length = config.data.seq_len
    try:
        sizes = state_bytes(config.model, 1, max_length=length)
    except UserError as error:
        return f"none: {error}"
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in sizes.items() if size)
    extent = "any length" if config.model.window is not None else f"{length:,} tokens"
    return f"per row: {kinds}, for {extent}"


def _fit(
    config: RunConfig, mesh: Mapping[str, int], used: DeviceMemory, hardware: Hardware, flops: float
) -> dict[str, str]:
    change = remedy(config, mesh, used, hardware)
    num_devices = math.prod(mesh.values())
    seconds = flops / (num_devices * PEAK_SHARE * hardware.peak_flops)
    step = f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
    axes = " x ".join(f"{name} {size}" for name, size in mesh.items())
    # A CPU's compiler computes some bfloat16 products in float32 and has attention in XLA.
    fits = {"fits": "yes"} if change is None else {"fits": "DOES NOT FIT", "change": change}
    return {
        "devices": f"{num_devices} x {hardware.name}: {axes}",
        "memory: there is": _per_device(hardware.memory_bytes),
        **fits,
        f"FLOPs at {PEAK_SHARE:.0%} of peak": (
            f"{step} per step, {seconds * config.steps / 3600:,.1f} hours in all "
            f"(arithmetic, no prediction; peak {hardware.peak_flops / 1e12:,.0f} TFLOP/s)"
        ),
    }


def _per_device(size: float) -> str:
    return f"{size_text(size)} per device"


def remedy(
    config: RunConfig, mesh: Mapping[str, int], used: DeviceMemory, hardware: Hardware
) -> str | None:
    """The change that makes a step fit; None if it fits. Parameters, gradients and optimizer are
    sharded along fsdp, seq and tensor; the rest is proportional to the tokens that a device
    computes at once."""
    if used.total <= hardware.memory_bytes:
        return None
    if used.lasting > hardware.memory_bytes:
        return _shard_parameters(mesh, used, hardware)
    return _shrink_activations(config, mesh, used.rest / (hardware.memory_bytes - used.lasting))


def _shard_parameters(mesh: Mapping[str, int], used: DeviceMemory, hardware: Hardware) -> str:
    copies = mesh["data"]
    for factor in _divisors(copies):
        if used.lasting / factor + used.rest <= hardware.memory_bytes:
            return (
                f"parameters, gradients and optimizer: raise MeshConfig.fsdp from {mesh['fsdp']} "
                f"to {mesh['fsdp'] * factor} (data from {copies} to {copies // factor})"
            )
    whole = used.lasting * math.prod(mesh.values()) / copies
    room = max(hardware.memory_bytes - used.rest, hardware.memory_bytes / 2)
    devices = math.ceil(whole / room / DEVICES_PER_NODE) * DEVICES_PER_NODE
    return (
        f"parameters, gradients and optimizer, even in {math.prod(mesh.values())} parts: take at "
        f"least {devices} devices, all of them along fsdp or tensor"
    )


def _shrink_activations(config: RunConfig, mesh: Mapping[str, int], factor: float) -> str:
    """A layout whose activations are smaller by `factor`."""
    parts = config.accumulation_steps
    rows = config.batch_size // (mesh["data"] * mesh["fsdp"] * parts)
    for share in _divisors(rows):
        if share >= factor:
            return (
                f"activations: raise RunConfig.accumulation_steps from {parts} to {parts * share}"
            )
    if config.model.remat in ("none", "dots"):
        return f"activations: set TransformerConfig.remat = 'block' (now {config.model.remat!r})"
    for axis in ("fsdp", "data"):
        for share in _divisors(mesh[axis]):
            if share * rows >= factor:
                return (
                    f"activations: raise MeshConfig.seq from {mesh['seq']} to "
                    f"{mesh['seq'] * share} ({axis} from {mesh[axis]} to {mesh[axis] // share}) "
                    f"and RunConfig.accumulation_steps from {parts} to {parts * share * rows}"
                )
    return f"activations: shorten the rows or take {math.ceil(factor)} times the devices along seq"


def _divisors(n: int) -> list[int]:
    return [factor for factor in range(2, n + 1) if n % factor == 0]
