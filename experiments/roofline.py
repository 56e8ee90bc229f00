"""How long a training step should take: what is computed, moved and sent, over what the data sheets
promise.

    step = max(products, hidden traffic) + exposed traffic + optimizer

Gathers of parameters and reductions of gradients hide behind the products; what a product waits for
(sums along `tensor`, neighbours along `seq`, exchanges of Muon) does not.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ttcd_jax.models.config import Remat
from ttcd_jax.sharding.collectives import Collective
from ttcd_jax.train.hardware import Hardware

PRODUCT_SHARE = 0.6  # of the peak, by matrix products and everything that stands between them
TRAFFIC_SHARE = 0.8  # of a bandwidth, by collectives
# Products computed, over those of one forward and one backward: some run the forward again.
RECOMPUTE: dict[Remat, float] = {"none": 1.0, "dots": 1.0, "block": 4 / 3, "offload": 4 / 3}
ASSUMPTIONS = (
    f"products at {PRODUCT_SHARE:.0%} of the bfloat16 peak, collectives at {TRAFFIC_SHARE:.0%} of "
    "their bandwidth, no latencies",
    "every device does an equal share; remat 'block' and 'offload' compute 4/3 of the products",
    "a ring inside a node runs over its links; one that leaves it over as many network adapters as "
    "it has devices in a node",
    "hidden behind products: all-gathers, reduce-scatters and all-reduces along data, fsdp, seq; "
    "exposed: everything else",
    "the optimizer reads and writes its state, the parameters and the gradients once",
)
_RINGS = ("all-gather", "all-reduce", "reduce-scatter")


class Traffic(NamedTuple):
    """All collectives of one kind along the same axes, in one step of one device."""

    kind: str
    axes: tuple[str, ...]
    count: int
    num_bytes: int
    seconds: float
    is_exposed: bool


class StepTime(NamedTuple):
    """Seconds of one step."""

    products: float
    hidden: float
    exposed: float
    optimizer: float

    @property
    def total(self) -> float:
        return max(self.products, self.hidden) + self.exposed + self.optimizer


def traffic(
    collectives: Iterable[Collective], mesh: Mapping[str, int], hardware: Hardware
) -> list[Traffic]:
    """What the collectives of a step come to, the longest first; `mesh` is `Mesh.shape`, neighbours
    along its last axis closest together."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for one in collectives:
        groups.setdefault((one.kind, one.axes), []).append(one)
    found = []
    for (kind, axes), members in groups.items():
        size = sum(one.num_bytes * one.count for one in members)
        seconds = size / (TRAFFIC_SHARE * bandwidth(kind, axes, mesh, hardware))
        is_exposed = kind not in _RINGS or "tensor" in axes
        count = sum(one.count for one in members)
        found.append(Traffic(kind, axes, count, size, seconds, is_exposed))
    return sorted(found, key=lambda one: -one.seconds)


def bandwidth(
    kind: str, axes: tuple[str, ...], mesh: Mapping[str, int], hardware: Hardware
) -> float:
    """Bytes per second that a device sends of a collective along `axes`.

    Of a ring that runs through several nodes only the last device of a node sends to the next one;
    rings started at every device share all adapters of the node.
    """
    neighbours = min(hardware.devices_per_node, math.prod(mesh.values()))
    coordinates = np.unravel_index(np.arange(neighbours), tuple(mesh.values()))
    is_member = np.ones(neighbours, bool)
    for name, along in zip(mesh, coordinates, strict=True):
        if name not in axes:
            is_member &= along == 0
    inside = int(is_member.sum())
    if inside == math.prod(mesh[name] for name in axes):
        return hardware.link_bandwidth
    adapters = inside if kind in _RINGS else 1
    return min(hardware.link_bandwidth, adapters * hardware.network_bandwidth)


def step_time(
    *,
    flops: float,
    remat: Remat,
    sent: Iterable[Traffic],
    optimizer_bytes: float,
    hardware: Hardware,
) -> StepTime:
    """The terms of a step: `flops` one device's share of forward and backward without recomputing,
    `optimizer_bytes` what it holds of parameters, gradients and optimizer state."""
    sent = list(sent)
    return StepTime(
        products=flops * RECOMPUTE[remat] / (PRODUCT_SHARE * hardware.peak_flops),
        hidden=sum(one.seconds for one in sent if not one.is_exposed),
        exposed=sum(one.seconds for one in sent if one.is_exposed),
        optimizer=2 * optimizer_bytes / hardware.memory_bandwidth,
    )
