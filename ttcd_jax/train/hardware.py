"""Accelerators by their data sheets: what a device computes, holds and moves per second."""

import dataclasses
import re

from ttcd_jax.config import Config, closest
from ttcd_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware(Config):
    """One device and its place in a node. `peak_flops`: dense bfloat16 products per second, twice
    the multiplications. Bandwidths in bytes per second and direction: `memory_bandwidth` of the
    device's own memory, `link_bandwidth` to the others of its node, `network_bandwidth` to other
    nodes, an adapter of 400 Gbit/s for each device assumed."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float = 50e9
    devices_per_node: int = 8


HARDWARE = {
    device.name: device
    for device in (
        Hardware(
            name="A100",
            peak_flops=312e12,
            memory_bytes=80e9,
            memory_bandwidth=2.039e12,
            link_bandwidth=300e9,
        ),
        Hardware(
            name="H100",
            peak_flops=989e12,
            memory_bytes=80e9,
            memory_bandwidth=3.35e12,
            link_bandwidth=450e9,
        ),
        Hardware(
            name="H200",
            peak_flops=989e12,
            memory_bytes=141e9,
            memory_bandwidth=4.8e12,
            link_bandwidth=450e9,
        ),
        Hardware(
            name="B200",
            peak_flops=2250e12,
            memory_bytes=180e9,
            memory_bandwidth=8e12,
            link_bandwidth=900e9,
        ),
    )
}


def data_sheet(device_kind: str) -> Hardware | None:
    """Of the accelerator that calls itself `device_kind`; None of an unknown one."""
    return next((device for name, device in HARDWARE.items() if name in device_kind), None)


def parse_topology(text: str) -> tuple[Hardware, int]:
    """(device, number of them) of e.g. 'h100x64'. Raises `UserError`."""
    match = re.fullmatch(r"([a-z]\w*?)x(\d+)", text.lower())
    if match is None or int(match[2]) < 1:
        raise UserError(f"topology {text!r} must be a device and a number, as in 'h100x64'")
    name, count = match[1].upper(), int(match[2])
    if name not in HARDWARE:
        known = ", ".join(HARDWARE).lower()
        raise UserError(
            f"topology {text!r}: no data sheet of {match[1]!r}"
            f"{closest(match[1], [device.lower() for device in HARDWARE])} (known: {known})"
        )
    device = HARDWARE[name]
    if count > device.devices_per_node and count % device.devices_per_node:
        raise UserError(
            f"topology {text!r}: {count} devices do not fill nodes of {device.devices_per_node}"
        )
    return device, count
