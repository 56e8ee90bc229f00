"""Scripts that a test runs on eight fake devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_on_devices(script: Path, method: str, output: Path, *meshes: str) -> Any:
    """What `script` writes into `output`, as JSON."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    subprocess.run(
        [sys.executable, script, method, output, *meshes],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=280,
    )
    return json.loads(output.read_text())
