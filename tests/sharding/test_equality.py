"""Every method computes on a mesh what it computes on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ttcd_jax.models.catalog import METHODS

SCRIPT = Path(__file__).with_name("equal_on_devices.py")
# data x fsdp x seq x tensor. Two parts of a row lie on each device, and a window on three.
EVERYWHERE = "1x1x4x2"
MESHES = {"ipttcd": ("1x8x1x1", "1x1x8x1", "2x1x2x2", EVERYWHERE)}
# Float64; what the memory holds is measured in float32.
TOLERANCE = 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_a_mesh_changes_neither_loss_nor_gradients(method, tmp_path):
    meshes = MESHES.get(method, (EVERYWHERE,))
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    subprocess.run(
        [sys.executable, SCRIPT, method, tmp_path / "worst.json", *meshes],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=280,
    )
    worst = json.loads((tmp_path / "worst.json").read_text())
    assert worst.keys() == set(meshes)
    assert {mesh: value for mesh, value in worst.items() if not value < TOLERANCE} == {}
