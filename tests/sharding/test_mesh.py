import jax
import pytest

from ttcd_jax.errors import UserError
from ttcd_jax.sharding.mesh import AXES, MeshConfig, build_mesh


@pytest.mark.parametrize(
    ("config", "devices", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({}, 8, (1, 8, 1, 1)),
        ({"data": -1, "fsdp": 2, "tensor": 2}, 8, (2, 2, 1, 2)),
        ({"data": 2, "fsdp": 1, "seq": 4}, 8, (2, 1, 4, 1)),
        ({"data": 4, "slices": 2}, 8, (4, 2, 1, 1)),
    ],
)
def test_an_open_axis_takes_what_the_others_leave(config, devices, sizes):
    assert tuple(MeshConfig(**config).sizes(devices).values()) == sizes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fsdp": 3}, "data 1 x fsdp 3 x seq 1 x tensor 1 = 3 devices, and there are 8"),
        ({"seq": 3}, "seq 3 x tensor 1 = 3 devices or a multiple, and there are 8"),
        ({"slices": 2}, "slices 2 does not divide data 1"),
        ({"data": 0}, "MeshConfig.data 0 must be at least 1, or -1"),
        ({"data": -1}, "data and fsdp are -1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_numbers(config, message):
    with pytest.raises(UserError, match=message):
        MeshConfig(**config).sizes(8)


def test_axes_are_automatic_and_slices_are_looked_for():
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    with pytest.raises(UserError, match="slices is 2, and the devices come in"):
        build_mesh(MeshConfig(data=2, fsdp=1, slices=2), [*jax.devices()[:1]] * 2)


class _Device:
    """A fake of what a mesh over slices reads of a device."""

    platform, device_kind = "gpu", "none"

    def __init__(self, number: int, slice_index: int):
        self.id, self.slice_index, self.process_index = number, slice_index, 0


def test_only_data_leaves_a_slice():
    devices = [_Device(number, slice_index=number % 2) for number in range(8)]
    mesh = build_mesh(MeshConfig(data=2, fsdp=4, slices=2), devices)
    slices = [[device.slice_index for device in row.flat] for row in mesh.devices]
    assert slices == [[0] * 4, [1] * 4]
