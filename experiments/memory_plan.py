"""What a device holds during a training step, and what to change when that is too much."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.hardware import Hardware


class Memory(NamedTuple):
    """Bytes of one device. `rest`: activations and everything else that lives inside a step."""

    params: int
    gradients: int
    optimizer: int
    rest: int

    @property
    def lasting(self) -> int:
        """What no smaller batch reduces."""
        return self.params + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.lasting + self.rest


def remedy(
    config: RunConfig, mesh: Mapping[str, int], memory: Memory, hardware: Hardware
) -> str | None:
    """What to change so that a step fits; None if it does. New values are by these rules: all that
    lasts is cut along fsdp, seq and tensor; the rest is proportional to the tokens a device
    computes at once."""
    if memory.total <= hardware.memory_bytes:
        return None
    if memory.lasting > hardware.memory_bytes:
        return _cut_parameters(mesh, memory, hardware)
    return _cut_activations(config, mesh, memory.rest / (hardware.memory_bytes - memory.lasting))


def _cut_parameters(mesh: Mapping[str, int], memory: Memory, hardware: Hardware) -> str:
    copies = mesh["data"]
    for factor in _divisors(copies):
        if memory.lasting / factor + memory.rest <= hardware.memory_bytes:
            return (
                f"parameters, gradients and optimizer: raise MeshConfig.fsdp from {mesh['fsdp']} "
                f"to {mesh['fsdp'] * factor} (data from {copies} to {copies // factor})"
            )
    node = hardware.devices_per_node
    whole = memory.lasting * math.prod(mesh.values()) / copies
    room = max(hardware.memory_bytes - memory.rest, hardware.memory_bytes / 2)
    devices = math.ceil(whole / room / node) * node
    return (
        f"parameters, gradients and optimizer, even in {math.prod(mesh.values())} parts: take at "
        f"least {devices} devices, all of them along fsdp or tensor"
    )


def _cut_activations(config: RunConfig, mesh: Mapping[str, int], factor: float) -> str:
    """`factor`: how much smaller activations have to be."""
    parts = config.accumulation_steps
    rows = config.batch_size // (mesh["data"] * mesh["fsdp"] * parts)
    for cut in _divisors(rows):
        if cut >= factor:
            return f"activations: raise RunConfig.accumulation_steps from {parts} to {parts * cut}"
    if config.model.remat in ("none", "dots"):
        return f"activations: set TransformerConfig.remat = 'block' (now {config.model.remat!r})"
    for axis in ("fsdp", "data"):
        for cut in _divisors(mesh[axis]):
            if cut * rows >= factor:
                return (
                    f"activations: raise MeshConfig.seq from {mesh['seq']} to {mesh['seq'] * cut} "
                    f"({axis} from {mesh[axis]} to {mesh[axis] // cut}) and "
                    f"RunConfig.accumulation_steps from {parts} to {parts * cut * rows}"
                )
    return f"activations: shorten the rows or take {math.ceil(factor)} times the devices along seq"


def _divisors(n: int) -> list[int]:
    return [factor for factor in range(2, n + 1) if n % factor == 0]
