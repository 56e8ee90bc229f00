"""Data sheets of accelerators: peak FLOP/s, bytes of device memory, and the links between them.

Links are those of one GPU, in one direction, by the data sheets of NVIDIA's DGX A100, H100, H200
and B200: half of NVLink's 600, 900, 900 and 1,800 GB/s, and a network card of 200, 400, 400 and 400
Gb/s. The times of a hop are NCCL's (src/graph/tuning.cc, `hwLat`, ring, LL128).
"""

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
    """One device. `peak_flops`: dense bfloat16 FLOP/s, two for each multiplication and addition;
    `node_rate` and `network_rate`: bytes/s that it sends to devices of its node, and to others."""

    name: str
    peak_flops: float
    memory_bytes: float
    node_rate: float
    network_rate: float


NODE_HOP, NETWORK_HOP = 1.9e-6, 4.0e-6  # seconds
HARDWARE = {
    x.name: x
    for x in (
        Hardware("A100", 312e12, 80e9, node_rate=300e9, network_rate=25e9),
        Hardware("H100", 989e12, 80e9, node_rate=450e9, network_rate=50e9),
        Hardware("H200", 989e12, 141e9, node_rate=450e9, network_rate=50e9),
        Hardware("B200", 2250e12, 180e9, node_rate=900e9, network_rate=50e9),
    )
}
SMALLEST = HARDWARE["A100"].memory_bytes  # where a device has no data sheet


def data_sheet(device_kind: str) -> Hardware | None:
    """The accelerator whose name is a word of `device_kind`; None for an unknown one, and for cards
    of that name with another clock or memory."""
    if re.search(r"(?i)\b(pcie|nvl|40gb)\b", device_kind):
        return None
    words = re.findall(r"\w+", device_kind.replace("GB200", "B200"))  # that chip, beside a CPU
    return next((device for name, device in HARDWARE.items() if name in words), None)


def device_bytes() -> float:
    """Bytes of one local device that XLA may take, infinite where no limit is known."""
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
