"""Data sheets of accelerators: peak FLOP/s and bytes of device memory."""

import math
import re
from typing import NamedTuple

import jax

from ttcd_jax.allocation import host_bytes
from ttcd_jax.config import closest
from ttcd_jax.errors import UserError

DEVICES_PER_NODE = 8
MOST_DEVICES = 4096  # planned by one process, as devices of its CPU


class Hardware(NamedTuple):
    """One device. `peak_flops`: dense bfloat16 FLOP/s, two for each multiplication and addition."""

    name: str
    peak_flops: float
    memory_bytes: float


HARDWARE = {
    "A100": Hardware("A100", peak_flops=312e12, memory_bytes=80e9),
    "H100": Hardware("H100", peak_flops=989e12, memory_bytes=80e9),
    "H200": Hardware("H200", peak_flops=989e12, memory_bytes=141e9),
    "B200": Hardware("B200", peak_flops=2250e12, memory_bytes=180e9),
}


def data_sheet(device_kind: str) -> Hardware | None:
    """The accelerator whose name is part of `device_kind`; None for an unknown one."""
    return next((device for name, device in HARDWARE.items() if name in device_kind), None)


def device_bytes() -> float:
    """Bytes of one local device that XLA may take, infinite where its allocator knows no limit;
    devices of a CPU share those of the host in equal parts."""
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return host_bytes() // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)


def parse_topology(text: str) -> tuple[Hardware, int]:
    """(device, number of devices) from e.g. 'h100x64'. Raises `UserError`."""
    match = re.fullmatch(r"([a-z]\w*?)x(\d{1,9})", text.lower())
    if match is None or int(match[2]) < 1:
        raise UserError(f"topology {text!r} must be a device and a number, as in 'h100x64'")
    name, count, known = match[1], int(match[2]), [device.lower() for device in HARDWARE]
    if name not in known:
        problem = f"topology {text!r}: no data sheet of {name!r}{closest(name, known)} "
        raise UserError(problem + f"(known: {', '.join(known)})")
    if count > MOST_DEVICES:
        raise UserError(f"topology {text!r}: {count} devices, plans go up to {MOST_DEVICES}")
    if count > DEVICES_PER_NODE and count % DEVICES_PER_NODE:
        problem = f"{count} devices do not fill nodes of {DEVICES_PER_NODE}"
        raise UserError(f"topology {text!r}: {problem}")
    return HARDWARE[name.upper()], count
