"""Every method computes on a mesh what it computes on one device."""

import itertools
import json
from pathlib import Path

import pytest
from devices import run_on_devices

from ttcd_jax.methods import METHODS

FOLDER = Path(__file__).parent
# data x fsdp x seq x tensor. The window reaches over the shards of three devices.
EVERYWHERE = "1x1x4x2"
MESHES = {"ipttcd": ["1x8x1x1", "1x1x8x1", EVERYWHERE]}
# Float64; what the memory holds is measured in float32.
TOLERANCE = 1e-6


@pytest.mark.parametrize(
    "methods", list(itertools.batched([*METHODS, "corrected"], 3)), ids="-".join
)
def test_a_mesh_changes_neither_loss_nor_gradients(methods):
    """Several methods to a process, which takes long to start."""
    meshes = {method: MESHES.get(method, [EVERYWHERE]) for method in methods}
    found = run_on_devices(FOLDER / "equal_on_devices.py", json.dumps(meshes))
    assert {method: list(worst) for method, worst in found.items()} == meshes
    for method, worst in found.items():
        assert {mesh: value for mesh, value in worst.items() if not value < TOLERANCE} == {}, method


def test_steps_of_muon_in_parts_on_a_mesh_equal_whole_ones_on_a_device():
    found = run_on_devices(FOLDER / "steps_on_devices.py", "ipttcd", "1x2x2x2")
    assert found["worst"] < 1e-10
    assert found["programs"] == 1
