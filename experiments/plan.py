"""The dry run: the cost of a configuration before anything is allocated, and the changes that make
a step fit."""

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from ttcd_jax.allocation import RESERVE_BYTES, SHARE, memory_share
from ttcd_jax.errors import UserError
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.models.config import memory_chunk
from ttcd_jax.run.build import Program, shard_bytes
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.layout import laid_out, run_mesh
from ttcd_jax.sharding.mesh import MeshConfig
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.hardware import Hardware, data_sheet, device_bytes, parse_topology
from ttcd_jax.train.state import num_params
from ttcd_jax.units import size as size_text

PEAK_SHARE = 0.4  # of the data sheet's peak FLOP/s, for the time of the FLOPs
_MARGIN = 0.97  # of the room: changes that leave less are not the last


class DeviceMemory(NamedTuple):
    """Bytes on one device. `rest`: activations and everything else that exists during a step."""

    params: int
    gradients: int
    optimizer: int
    rest: int

    @property
    def total(self) -> int:
        return sum(self)


def use_topology(topology: str) -> Hardware:
    """Gives this process as many CPU devices as `topology` has. Call it before the first array."""
    hardware, count = parse_topology(topology)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    return hardware


def make_plan(config: RunConfig, mesh: Mesh) -> tuple[DeviceMemory, jax.stages.Compiled]:
    """(bytes of a step on one device of `mesh`, the compiled training step)."""
    program = Program(config, mesh)
    with jax.set_mesh(mesh):
        compiled = program.step().compile()
    params, optimizer = (shard_bytes(program.state[x]) for x in ("params", "opt_state"))
    # Gradients are as large as the parameters, and part of the temporary arrays.
    sizes = compiled.memory_analysis()
    assert sizes is not None, "the compiler reports the bytes of its program"
    temporary = sizes.temp_size_in_bytes + shard_bytes(program.batch)
    return DeviceMemory(params, params, optimizer, max(temporary - params, 0)), compiled


def print_plan(config: RunConfig, hardware: Hardware | None) -> None:
    """Prints parameters, memory per device, FLOPs and, on accelerators, whether the step fits, the
    changes that make it fit, and by a data sheet the time of its FLOPs at a share of the peak.
    Compiles the real step for this process's devices. Raises `UserError` for a mesh that does not
    fit them or the batch."""
    mesh = run_mesh(config)
    # The devices of a topology are CPUs that stand for accelerators.
    config = laid_out(config, mesh if hardware is None else mesh.abstract_mesh)
    used, _ = make_plan(config, mesh)
    length = config.data.seq_len
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    tokens, flops = config.batch_size * length, training_flops_per_token(config.model, length)
    lines = {
        "parameters": f"{num_params(config.model):,}",
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
        "layout": f"{axes}; parts {config.accumulation_steps}; remat {config.model.remat}",
    }
    if hardware is not None:
        share, whole = memory_share(), hardware.memory_bytes
        origin = f"{share:.4g} ({SHARE}) of {size_text(whole)}"
        lines |= _fit(config, mesh, used, share * whole, origin)
    elif (device := jax.devices()[0]).platform != "cpu":
        hardware, whole = data_sheet(device.device_kind), device_bytes()
        lines |= _fit(
            config, mesh, used, whole, f"XLA's {size_text(whole)} of {device.device_kind}"
        )
    if hardware is not None:
        lines |= _time(config, mesh, hardware, flops * tokens)
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


def _decoding_state(config: RunConfig) -> str:
    length = config.data.seq_len
    try:
        sizes = state_bytes(config.model, 1, max_length=length)
    except UserError as error:
        return f"none: {error}"
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in sizes.items() if size)
    is_bounded = config.model.window is not None or not sizes.get("attention")
    extent = "any length" if is_bounded else f"{length:,} tokens"
    return f"per row: {kinds}, for {extent}"


def _fit(
    config: RunConfig, mesh: Mesh, used: DeviceMemory, whole: float, origin: str
) -> dict[str, str]:
    """Whether a step fits into the `whole` memory of a device less the reserve."""
    room = whole - RESERVE_BYTES
    changes = changes_to_fit(config, mesh, used, room)
    # An estimate: compiled for CPUs, some bfloat16 products are in float32, attention is in XLA.
    lines = {
        "memory: there is": (
            f"{_per_device(room)}: {origin}, less {size_text(RESERVE_BYTES)} for programs and gaps"
        ),
        "fits": "yes" if used.total <= room else "DOES NOT FIT",
    }
    for number, change in enumerate(changes, 1):
        flags = " ".join(f'--param="{binding}"' for binding in change.param.splitlines())
        lines[f"change {number}"] = f"{flags}: {_per_device(change.total)}; {change.cost}"
    if used.total > room and not (changes and changes[-1].total <= _MARGIN * room):
        lines["and"] = f"more devices than {mesh.size}, or shorter rows"
    return lines


def _time(config: RunConfig, mesh: Mesh, hardware: Hardware, flops: float) -> dict[str, str]:
    seconds = flops / (mesh.size * PEAK_SHARE * hardware.peak_flops)
    step = f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
    return {
        "devices": f"{mesh.size} x {hardware.name}",
        f"FLOPs at {PEAK_SHARE:.0%} of peak": (
            f"{step} per step, {seconds * config.steps / 3600:,.1f} hours in all "
            f"(arithmetic, no prediction; peak {hardware.peak_flops / 1e12:,.0f} TFLOP/s)"
        ),
    }


def _per_device(size: float) -> str:
    return f"{size_text(size)} per device"


class Change(NamedTuple):
    """Bindings that make a step smaller, their cost, and the configuration with them and all
    earlier changes; the bytes per device that it takes, once it is compiled."""

    param: str
    cost: str
    config: RunConfig
    total: int = 0


def changes_to_fit(config: RunConfig, mesh: Mesh, used: DeviceMemory, room: float) -> list[Change]:
    """The changes that make a step fit into `room` bytes with a margin, the cheapest first, each on
    top of those before it and compiled; empty if it fits. If it does not fit with the last one
    either, no layout of these devices does."""
    if used.total <= room:
        return []
    changes: list[Change] = []
    devices = mesh.devices.flatten().tolist()
    proposals = [_shrink_parts, _recompute, *[_shard_rows] * mesh.size]
    if used.total - used.rest > room:  # in a smaller batch as well
        proposals.insert(0, _shard_parameters)
    for propose in proposals:
        if used.total <= _MARGIN * room:
            break
        if (change := propose(config, mesh)) is None:
            continue
        smaller_mesh = run_mesh(change.config, devices)
        smaller, _ = make_plan(change.config, smaller_mesh)
        if smaller.total < used.total:
            config, mesh, used = change.config, smaller_mesh, smaller
            changes.append(change._replace(total=used.total))
    return changes


def _shard_parameters(config: RunConfig, mesh: Mesh) -> Change | None:
    sizes = mesh.shape
    if sizes["data"] == 1:
        return None
    param, config = _on_mesh(config, data=1, fsdp=sizes["fsdp"] * sizes["data"])
    return Change(param, "parameters are gathered from more devices", config)


def _shrink_parts(config: RunConfig, mesh: Mesh) -> Change | None:
    parts = config.batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])
    param = f"RunConfig.accumulation_steps={parts}"
    cost = "smaller products, the same FLOPs"
    return Change(param, cost, config.replace(accumulation_steps=parts))


def _recompute(config: RunConfig, mesh: Mesh) -> Change | None:
    if config.model.remat not in ("none", "dots"):
        return None
    changed = config.replace(model=config.model.replace(remat="block"))
    cost = "blocks run forward twice: 4/3 of the FLOPs"
    return Change("TransformerConfig.remat='block'", cost, changed)


def _shard_rows(config: RunConfig, mesh: Mesh) -> Change | None:
    sizes = mesh.shape
    axis = next((name for name in ("fsdp", "data") if sizes[name] % 2 == 0), None)
    if axis is None or config.data.seq_len % (2 * sizes["seq"] * (memory_chunk(config.model) or 1)):
        return None
    mesh_param, config = _on_mesh(config, **{axis: sizes[axis] // 2, "seq": 2 * sizes["seq"]})
    parts = 2 * config.batch_size // (sizes["data"] * sizes["fsdp"])
    param = f"RunConfig.accumulation_steps={parts}\n{mesh_param}"
    cost = "neighbors exchange keys and states; more, smaller parts"
    return Change(param, cost, config.replace(accumulation_steps=parts))


def _on_mesh(config: RunConfig, **sizes: int) -> tuple[str, RunConfig]:
    changed = (config.mesh or MeshConfig()).replace(**sizes)
    bound = "\n".join(f"MeshConfig.{name}={size}" for name, size in sizes.items())
    return f"RunConfig.mesh=@MeshConfig()\n{bound}", config.replace(mesh=changed)
