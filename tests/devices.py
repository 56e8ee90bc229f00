"""Processes with fake devices, and scripts that a test runs on eight of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def fake_devices(count: int) -> str:
    """XLA_FLAGS of a process that has `count` devices."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"


def environment(count: int = 1, **variables: str) -> dict[str, str]:
    """Of a process that has `count` devices and finds the modules of the tests."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": fake_devices(count),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **variables,
    }


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def printed(script: str, *arguments: str, count: int = 4, **variables: str) -> str:
    """Standard output of a test file run as a program with `count` devices."""
    command, env = [sys.executable, script, *arguments], environment(count, **variables)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_on_devices(script: Path, case: str, output: Path, *meshes: str) -> Any:
    """What `script` writes of `case` into `output`, as JSON."""
    subprocess.run(
        [sys.executable, script, case, output, *meshes],
        env=environment(8),
        check=True,
        timeout=600,
    )
    return json.loads(output.read_text())
