"""The rows of a batch that a process makes, from its devices on the mesh."""

from types import SimpleNamespace

import numpy as np
import pytest

from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.synthetic.recall import RecallConfig, RecallRows
from ttcd_jax.errors import UserError
from ttcd_jax.sharding.batch import Placement
from ttcd_jax.sharding.mesh import MeshConfig, build_mesh

B, T, PROCESSES = 8, 16, 4


class _Device:
    """A fake of what a placement reads of a device, as `process` sees it: two for each process."""

    platform, device_kind = "cpu", "none"

    def __init__(self, number: int, process: int):
        self.id, self.process_index = number, number // 2
        self.client = SimpleNamespace(process_index=lambda: process)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"fsdp": 8}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ({"data": 2, "seq": 2}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        # Processes whose devices hold parts of the same rows each supply those rows.
        ({"data": 2, "tensor": 4}, [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)] * 2),
        ({"seq": 8}, [tuple(range(B))] * PROCESSES),
    ],
)
def test_processes_make_the_rows_of_their_devices(sizes, expected):
    source = RecallRows(RecallConfig(num_slots=9, num_keys=4, num_values=4), seed=0, num_rows=3 * B)
    for process, own in enumerate(expected):
        devices = [_Device(number, process) for number in range(2 * PROCESSES)]
        mesh = build_mesh(MeshConfig(**sizes), devices)
        rows = Placement(mesh, batch_size=B, length=T).rows
        assert rows == own
        batches = Batches(source, batch_size=B, rows=rows)
        expected_rows = [source[B + row]["tokens"] for row in own]
        np.testing.assert_array_equal(batches.at(1)["tokens"], expected_rows)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 8}, r"\[batch_size, seq_len\] \(4, 12\): its axis 'batch' of 4 .* 8 devices"),
        ({"seq": 8, "fsdp": 1}, "its axis 'length' of 12 does not divide among 8 devices"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_both_numbers(sizes, message):
    mesh = build_mesh(MeshConfig(**sizes), [_Device(number, 0) for number in range(8)])
    with pytest.raises(UserError, match=message):
        Placement(mesh, batch_size=4, length=12)
