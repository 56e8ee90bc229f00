"""Every method computes on a mesh what it computes on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ttcd_jax.models.catalog import METHODS

FOLDER = Path(__file__).parent
# data x fsdp x seq x tensor. Two parts of a row lie on each device, and a window on three.
EVERYWHERE = "1x1x4x2"
MESHES = {"ipttcd": ("1x8x1x1", "1x1x8x1", EVERYWHERE)}
# Float64; what the memory holds is measured in float32.
TOLERANCE = 1e-6


def _run(script, method, output, *meshes):
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    subprocess.run(
        [sys.executable, FOLDER / script, method, output, *meshes],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=280,
    )
    return json.loads(output.read_text())


@pytest.mark.parametrize("method", METHODS)
def test_a_mesh_changes_neither_loss_nor_gradients(method, tmp_path):
    meshes = MESHES.get(method, (EVERYWHERE,))
    worst = _run("equal_on_devices.py", method, tmp_path / "worst.json", *meshes)
    assert worst.keys() == set(meshes)
    assert {mesh: value for mesh, value in worst.items() if not value < TOLERANCE} == {}


def test_steps_of_muon_in_parts_on_a_mesh_equal_whole_ones_on_a_device(tmp_path):
    found = _run("steps_on_devices.py", "ipttcd", tmp_path / "found.json", "1x2x2x2")
    assert found["worst"] < 1e-10
    assert found["programs"] == 1
