"""Processes with fake devices, and scripts that a test runs on eight of them."""

import json
import os
from pathlib import Path
from typing import Any

import commands


def fake_devices(count: int) -> str:
    """XLA_FLAGS of a process that has `count` devices."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"


def environment(count: int = 1, **variables: str) -> dict[str, str]:
    """The environment of a process with `count` devices that imports the modules of the tests."""
    # The root as well: tests/experiments must not hide the commands.
    folder = Path(__file__).parent
    paths = [str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": fake_devices(count),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **variables,
    }


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def printed(script: str, *arguments: str, count: int = 4, **variables: str) -> str:
    """Standard output of a test file run as a program with `count` devices."""
    return commands.output(Path(script), *arguments, env=environment(count, **variables))


def run_on_devices(script: Path, *arguments: str) -> Any:
    """The JSON that `script` prints on eight devices."""
    return json.loads(printed(str(script), *arguments, count=8))
