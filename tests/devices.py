"""Scripts that a test runs on eight fake devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_on_devices(script: Path, case: str, output: Path, *meshes: str) -> Any:
    """What `script` writes of `case` into `output`, as JSON."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    subprocess.run(
        [sys.executable, script, case, output, *meshes],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=600,
    )
    return json.loads(output.read_text())
