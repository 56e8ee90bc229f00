"""The mesh, the table of axes, and the rows of a batch that a process makes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from checks import refused
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ttcd_jax.axes import LOGICAL_AXES
from ttcd_jax.sharding import rules
from ttcd_jax.sharding.mesh import AXES, MeshConfig, build_mesh, num_nodes
from ttcd_jax.sharding.rules import Placement


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
    ("config", "words"),
    [
        ({"fsdp": 3}, "data 1 x fsdp 3 x seq 1 x tensor 1 = 3 devices, and there are 8"),
        ({"seq": 3}, "seq 3 x tensor 1 = 3 devices or a multiple, and there are 8"),
        ({"slices": 2}, "slices 2 does not divide data 1"),
        ({"data": 0}, "MeshConfig.data 0 must be at least 1, or -1"),
        ({"data": -1}, "data and fsdp are -1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_numbers(config, words):
    refused(words, lambda: MeshConfig(**config).sizes(8))


class _Device:
    """A fake of what a mesh reads of a device, as `process` sees it: two for each process, of two
    slices by turns."""

    device_kind = "none"

    def __init__(self, number: int, process: int = 0, platform: str = "cpu"):
        self.id, self.platform, self.slice_index = number, platform, number % 2
        self.process_index = 0 if platform == "gpu" else number // 2
        self.client = SimpleNamespace(process_index=lambda: process)


def test_axes_are_automatic_and_only_data_leaves_a_slice():
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {AxisType.Auto}
    explicit = AbstractMesh((2,), ("data",), (AxisType.Explicit,))
    refused("'data' is Explicit|build_mesh", rules.spec, ("batch",), explicit)
    two = MeshConfig(data=2, fsdp=1, slices=2)
    refused("slices is 2, and the devices come in", build_mesh, two, [*jax.devices()[:1]] * 2)
    devices = [_Device(number, platform="gpu") for number in range(8)]
    mesh = build_mesh(MeshConfig(data=2, fsdp=4, slices=2), devices)
    slices = [[device.slice_index for device in row.flat] for row in mesh.devices]
    assert slices == [[0] * 4, [1] * 4]
    assert num_nodes(devices) == 2
    for device in devices:  # on four hosts of one slice, in an order of their own
        device.slice_index, device.process_index = 0, device.id % 4
    assert num_nodes(devices) == 4
    mesh = build_mesh(MeshConfig(data=2, fsdp=4, slices=2), devices)
    hosts = [sorted(device.process_index for device in row.flat) for row in mesh.devices]
    assert hosts == [[0, 0, 1, 1], [2, 2, 3, 3]]
    refused("1 slices and 4 hosts", build_mesh, MeshConfig(data=8, fsdp=1, slices=8), devices)
    mesh = build_mesh(MeshConfig(data=8, fsdp=1, slices=8), devices, nodes=8)
    assert mesh.shape["data"] == 8


def _mesh(*sizes, types=(AxisType.Auto,) * 4):
    return AbstractMesh(sizes, AXES, axis_types=types)


def test_names_become_mesh_axes_by_a_table_that_knows_every_logical_axis_and_no_other():
    assert rules.RULES.keys() == {*LOGICAL_AXES, "batch", "length", "copies"}
    mesh = _mesh(2, 2, 2, 2)
    assert rules.spec(("vocab", "embed"), mesh) == PartitionSpec("tensor", ("fsdp", "seq"))
    names = ("batch", "length", None)
    assert rules.spec(names, mesh) == PartitionSpec(("data", "fsdp"), "seq", None)
    refused("wocab", rules.spec, ("wocab",), mesh, error=KeyError)
    # Axes that a surrounding shard_map cut are left alone.
    cut = _mesh(2, 2, 2, 2, types=(AxisType.Manual, AxisType.Auto) * 2)
    assert rules.spec(("batch", "length"), cut) == PartitionSpec("fsdp", None)


B = 8


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"fsdp": 8}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ({"data": 2, "seq": 2}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        # Processes whose devices hold parts of the same rows each supply those rows.
        ({"data": 2, "tensor": 4}, [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)] * 2),
        ({"seq": 8}, [tuple(range(B))] * 4),
    ],
)
def test_processes_make_the_rows_of_their_devices(sizes, expected):
    for process, own in enumerate(expected):
        mesh = build_mesh(MeshConfig(**sizes), [_Device(number, process) for number in range(8)])
        assert Placement(mesh, batch_size=B, length=16).rows == own


def test_what_does_not_divide_is_refused_with_both_numbers():
    for sizes, words in (
        ({"fsdp": 8}, "[batch_size, seq_len] (4, 12): its axis 'batch' of 4 |8 devices"),
        ({"seq": 8, "fsdp": 1}, "its axis 'length' of 12 does not divide among 8 devices"),
    ):
        mesh = build_mesh(MeshConfig(**sizes), [_Device(number) for number in range(8)])
        refused(words, Placement, mesh, batch_size=4, length=12)
    arrays = {"gate": jax.ShapeDtypeStruct((16, 30), jnp.float32)}
    words = "gate (16, 30): its axis 'mlp' of 30 |4 devices"
    refused(words, rules.shardings, _mesh(1, 1, 1, 4), {"gate": ("embed", "mlp")}, arrays)
