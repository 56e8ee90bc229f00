"""The dry run: the cost of a configuration before anything is allocated."""

import collections
import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ttcd_jax.allocation import RESERVE_BYTES, SHARE, memory_share
from ttcd_jax.errors import UserError
from ttcd_jax.files import write_json
from ttcd_jax.inference.state import state_bytes
from ttcd_jax.models.config import training_flops_per_token
from ttcd_jax.run.build import Program, shard_bytes
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.described import compiled, described_devices, missing_compiler
from ttcd_jax.run.layout import laid_out, run_mesh
from ttcd_jax.sharding import collectives as counter
from ttcd_jax.sharding.collectives import Collective, collectives
from ttcd_jax.sharding.mesh import num_nodes
from ttcd_jax.storage import user_cache
from ttcd_jax.train import hardware as sheets
from ttcd_jax.train.hardware import Hardware, data_sheet, device_bytes, parse_topology
from ttcd_jax.train.state import num_params
from ttcd_jax.units import size as size_text

PEAK_SHARE = 0.4  # of the data sheet's peak FLOP/s, for the time of the FLOPs
LINK_SHARE = 0.8  # of the data sheet's bytes/s, for the time of the collectives


class Target(NamedTuple):
    hardware: Hardware
    devices: Sequence[Any]  # described, or those of a CPU that stand for them


class Plan(NamedTuple):
    used: dict[str, int]  # bytes of one device by what they hold
    sent: list[Collective] | str  # or the reason why they could not be counted
    origin: str  # the program that says so


class Times(NamedTuple):
    """Seconds of a step: `shortest` with all that may be beside FLOPs beside them, `longest` one
    after the other."""

    flops: float
    links: dict[tuple[str, str], tuple[float, float]]  # by axes and link: bytes and seconds
    beside_work: float
    shortest: float
    longest: float


def use_topology(topology: str) -> Target:
    """The devices of `topology`: described to JAX's CUDA compiler or, without it, as many of this
    process's CPU. Call it before the first array."""
    hardware, count = parse_topology(topology)
    jax.config.update("jax_platforms", "cpu")
    if missing_compiler() is None:
        jax.config.update("jax_enable_compilation_cache", False)  # JAX cannot read them back
        return Target(hardware, described_devices(hardware, count))
    jax.config.update("jax_num_cpu_devices", count)
    return Target(hardware, jax.devices())


def make_plan(
    program: Program, step: jax.stages.Lowered
) -> tuple[dict[str, int], jax.stages.Compiled]:
    """(bytes of a step on one device by what they hold, the compiled step)."""
    made = compiled(step, program.mesh)
    params, optimizer = (shard_bytes(program.state[x]) for x in ("params", "opt_state"))
    # Gradients are as large as the parameters, and part of the temporary arrays.
    sizes = made.memory_analysis()
    assert sizes is not None, "the compiler reports the bytes of its program"
    rest = max(sizes.temp_size_in_bytes + shard_bytes(program.batch) - params, 0)
    used = {"parameters": params, "gradients": params, "optimizer": optimizer}
    return used | {"activations and all else": rest}, made


def plan_of(config: RunConfig, target: Target | None) -> tuple[RunConfig, Mesh, Plan]:
    """(`config` with its layout, its mesh, the plan) on devices of a target, or on those here.
    Raises `UserError` for a mesh that does not fit the devices or the batch."""
    mesh = run_mesh(config, target.devices, target.hardware) if target else run_mesh(config)
    # CPUs may stand for accelerators.
    config = laid_out(config, mesh if target is None else mesh.abstract_mesh)
    return config, mesh, _planned(config, mesh, target)


def _planned(config: RunConfig, mesh: Mesh, target: Target | None) -> Plan:
    """Read from the user's cache where the same program has been planned before, otherwise
    compiled, which is said on standard error."""
    program = Program(config, mesh)
    with jax.set_mesh(mesh):
        step = program.step()
    file = user_cache() / "plans" / f"{_digest(step, mesh, target)}.json"
    if file.exists():
        used, sent, origin = json.loads(file.read_bytes())
        return Plan(used, sent if isinstance(sent, str) else [Collective(*x) for x in sent], origin)
    device, reason = mesh.devices.flat[0], missing_compiler()
    where = f"{mesh.size} {device.device_kind or device.platform} devices"
    origin = f"as compiled for {where}"
    if target is not None:
        where = f"{mesh.size} described {target.hardware.name}s"
        origin = f"by the program of {where}, attention in XLA"
        if reason is not None:
            origin = f"by a CPU's program, up to twice as much ({reason})"
    print(f"compiling the step for {where}, once: seconds to minutes", file=sys.stderr, flush=True)
    used, made = make_plan(program, step)
    per_node = min(mesh.size, sheets.DEVICES_PER_NODE)
    if target is None:
        per_node = mesh.size // num_nodes([*mesh.devices.flat])
    try:
        sent = collectives(made.as_text() or "", mesh.shape, per_node)
    except ValueError as error:
        sent = str(error)
    plan = Plan(used, sent, origin)
    with contextlib.suppress(UserError):  # a cache that cannot be written
        write_json(file, plan)
    return plan


def _digest(step: jax.stages.Lowered, mesh: Mesh, target: Target | None) -> str:
    """Of all that a plan follows from."""
    device = mesh.devices.flat[0]
    facts = [step.as_text(), str(target and target.hardware), device.platform, device.device_kind]
    facts += [metadata.version("jaxlib"), os.environ.get("XLA_FLAGS", "")]
    facts += [Path(file).read_text(encoding="utf-8") for file in (__file__, counter.__file__)]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def times_of(flops: float, sent: Sequence[Collective], hardware: Hardware) -> Times:
    """The times of a step of so many FLOPs per device. A collective takes that of its slower link
    and a hop for every device of a ring, up and down a tree, or to any other at once."""
    links, beside = collections.defaultdict(lambda: (0.0, 0.0)), 0.0
    for one in sent:
        shares = {"network": one.crossing, "NVLink": 1 - one.crossing}
        network, node = shares.values()
        slower = max(network / hardware.network_rate, node / hardware.node_rate)
        ring, tree = one.devices - 1, 2 * math.ceil(math.log2(one.devices))
        hops = {"all-gather": ring, "reduce-scatter": ring, "all-reduce": tree}.get(one.kind, 1)
        hop = sheets.NETWORK_HOP * network + sheets.NODE_HOP * node
        seconds = left = one.times * (one.sent * slower / LINK_SHARE + hops * hop)
        beside += seconds * one.is_beside_work
        for link, share in shares.items():  # the network has the time of what uses it
            if share:
                size, before = links[one.axes, link]
                links[one.axes, link] = size + one.times * one.sent * share, before + left
                left = 0.0
    work = flops / (PEAK_SHARE * hardware.peak_flops)
    total = sum(seconds for _, seconds in links.values())
    return Times(work, dict(links), beside, max(work + total - beside, total), work + total)


def print_plan(config: RunConfig, target: Target | None) -> None:
    """Prints parameters, memory per device, FLOPs and, on accelerators, whether the step fits and,
    by data sheets, the time of its FLOPs and of what it sends. Compiles the real step. Raises
    `UserError` for a mesh that does not fit the devices or the batch."""
    config, mesh, (used, sent, of_program) = plan_of(config, target)
    total, length = sum(used.values()), config.data.seq_len
    tokens, flops = config.batch_size * length, flops_of(config)
    lines = {
        "parameters": f"{num_params(config.model):,}",
        "tokens per step": f"{tokens:,} ({config.batch_size} rows of {length:,})",
        "tokens in all": f"{tokens * config.steps:,} in {config.steps:,} steps",
        "training FLOPs per token": f"{flops / tokens:.4g}",
        "training FLOPs per step": f"{flops:.4g}",
        **{f"memory: {name}": _per_device(size) for name, size in used.items()},
        "memory: in all": _per_device(total),
        "decoding state": _decoding_state(config),
        "layout": f"{layout_of(config, mesh)}; remat {config.model.remat}",
    }
    lines["memory: activations and all else"] += f", {of_program}"
    device = jax.devices()[0]
    if target is not None or device.platform != "cpu":
        there, origin = room(target)
        reserve = f"less {size_text(RESERVE_BYTES)} for programs and gaps"
        lines["memory: there is"] = f"{_per_device(there)}: {origin}, {reserve}"
        lines["fits"] = misfit(total, there) or "yes"
    hardware = target.hardware if target is not None else data_sheet(device.device_kind)
    if hardware is not None:
        lines |= _time(config, mesh.size, hardware, flops, sent)
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


def layout_of(config: RunConfig, mesh: Mesh) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return f"{axes}; parts {config.accumulation_steps}"


def room(target: Target | None) -> tuple[float, str]:
    """(bytes of a device that a step may take, what they are a part of)."""
    if target is None:
        kind, whole = jax.devices()[0].device_kind, device_bytes()
        return whole - RESERVE_BYTES, f"XLA's {size_text(whole)} of {kind}"
    share, whole = memory_share(), target.hardware.memory_bytes
    return share * whole - RESERVE_BYTES, f"{share:.4g} ({SHARE}) of {size_text(whole)}"


def misfit(total: float, there: float) -> str | None:
    """Why a step of `total` bytes does not fit into a device, and the remedies; None if it fits."""
    if total <= there:
        return None
    return (
        f"DOES NOT FIT: {_per_device(total)}, there is {size_text(there)}: raise RunConfig."
        "accumulation_steps, set TransformerConfig.remat='block', or take more devices or shorter "
        "rows"
    )


def flops_of(config: RunConfig) -> float:
    """Training FLOPs of a step on all devices."""
    length = config.data.seq_len
    return config.batch_size * length * training_flops_per_token(config.model, length)


def _time(
    config: RunConfig, devices: int, hardware: Hardware, flops: float, sent: list[Collective] | str
) -> dict[str, str]:
    counted = [] if isinstance(sent, str) else sent
    work, links, beside, shortest, longest = times_of(flops / devices, counted, hardware)
    lines = {
        "devices": f"{devices} x {hardware.name}",
        f"FLOPs at {PEAK_SHARE:.0%} of peak": (
            f"{_clock(work)} per step, {work * config.steps / 3600:,.1f} hours in all "
            f"(arithmetic, no prediction; peak {hardware.peak_flops / 1e12:,.0f} TFLOP/s)"
        ),
    }
    if isinstance(sent, str):
        return lines | {"sent": f"not counted ({sent}), so there is no time of a step"}
    for (axes, link), (size, seconds) in sorted(links.items(), key=lambda x: -x[1][0]):
        took = _clock(seconds) if seconds else "at the same time"
        lines[f"sent: {axes}, {link}"] = f"{_per_device(size)} and step, {took}"
    return lines | {
        f"links at {LINK_SHARE:.0%}": (
            f"NVLink {hardware.node_rate / 1e9:.0f}, network {hardware.network_rate / 1e9:.0f} "
            f"GB/s per device and direction (NVIDIA's data sheets), {sheets.NODE_HOP * 1e6:.3g} "
            f"and {sheets.NETWORK_HOP * 1e6:.3g} us a hop (NCCL's table)"
        ),
        "step": (
            f"{_clock(shortest)} to {_clock(longest)}, {shortest * config.steps / 3600:,.1f} to "
            f"{longest * config.steps / 3600:,.1f} hours in all: what is sent takes "
            f"{_clock(longest - work)}, {_clock(beside)} of it with work scheduled beside it, "
            "which overlaps fully at best"
        ),
    }


def _clock(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _per_device(size: float) -> str:
    return f"{size_text(size)} per device"
