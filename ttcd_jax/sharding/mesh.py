"""The device mesh: four axes, sized by a configuration, over the devices of the job.

    data     copies of the model, each with its rows; the only axis that may cross slices
    fsdp     rows as well, and the parameters sharded along `embed`
    seq      positions of a row (`ttcd_jax.sharding.sequence`), and the parameters as along `fsdp`
    tensor   heads, MLP features and vocabulary entries

The devices of the last axes are the closest: `tensor` and `seq` need the fast links inside a node.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from ttcd_jax.config import Bound, Config, Positive
from ttcd_jax.errors import UserError

AXES = ("data", "fsdp", "seq", "tensor")
Size = Annotated[int, Bound("at least 1, or -1 for the rest", lambda size: size >= 1 or size == -1)]


class MeshConfig(Config):
    """Devices along each axis, `data`, `fsdp`, `seq` and `tensor`; one axis may be -1, for all that
    the others leave. `slices`: groups of whole nodes (hosts, or slices of a pod) joined by a slower
    network, which `data` alone crosses."""

    data: Size = 1
    fsdp: Size = -1
    seq: Size = 1
    tensor: Size = 1
    slices: Positive = 1

    def validate(self) -> None:
        open_axes = [name for name in AXES if getattr(self, name) == -1]
        if len(open_axes) > 1:
            raise UserError(
                f"MeshConfig: {' and '.join(open_axes)} are -1, and only one axis can take the rest"
            )

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Devices along each axis of a mesh of `num_devices`. Raises `UserError` when they do not
        multiply to that number, or `slices` does not divide `data`."""
        sizes = {name: getattr(self, name) for name in AXES}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != -1)
        rest = [name for name, size in sizes.items() if size == -1]
        if num_devices % fixed or (not rest and fixed != num_devices):
            raise UserError(
                f"the mesh wants {product} = {fixed} devices{' or a multiple' if rest else ''}, "
                f"and there are {num_devices}: change MeshConfig, or set one axis to -1"
            )
        if rest:
            sizes[rest[0]] = num_devices // fixed
        if sizes["data"] % self.slices:
            raise UserError(
                f"MeshConfig.slices {self.slices} does not divide data {sizes['data']}: only data "
                "may cross slices"
            )
        return sizes


def num_nodes(devices: Sequence[Any]) -> int:
    """How many nodes the devices are in: slices where there are several, otherwise hosts."""
    slices = {x.slice_index for x in devices if hasattr(x, "slice_index")}
    return len(slices) if len(slices) > 1 else len({x.process_index for x in devices})


def build_mesh(
    config: MeshConfig, devices: Sequence[Any] | None = None, *, nodes: int | None = None
) -> Mesh:
    """The mesh over `devices` (default: all of the job): `data` spans the slices, the other axes
    stay inside one. `nodes`: of devices that stand for those of so many. Raises `UserError` as
    `sizes` does, and when the devices do not come in groups of which `slices` can be made."""
    devices = jax.devices() if devices is None else devices
    sizes = config.sizes(len(devices))
    num_slices = len({x.slice_index for x in devices if hasattr(x, "slice_index")})
    num_hosts = nodes or len({device.process_index for device in devices})
    by_host = num_slices % config.slices or not num_slices
    if by_host and num_hosts % config.slices:
        raise UserError(
            f"MeshConfig.slices is {config.slices}, and the devices come in {num_slices} slices "
            f"and {num_hosts} hosts: set a number that divides one of these"
        )
    inside = (sizes["data"] // config.slices, *(sizes[name] for name in AXES[1:]))
    if config.slices == 1:
        array = mesh_utils.create_device_mesh(inside, devices)
    else:
        ordered = sorted(devices, key=lambda x: x.process_index if by_host else x.slice_index)
        groups = itertools.batched(ordered, len(devices) // config.slices)
        options = {"allow_split_physical_axes": True}
        array = np.concatenate(
            [mesh_utils.create_device_mesh(inside, group, **options) for group in groups]
        )
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))
