"""What devices that share a row send does not grow with the row."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("traffic_of_a_step.py")


def _traffic(method, folder):
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    subprocess.run(
        [sys.executable, SCRIPT, method, folder / "traffic.json"],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=280,
    )
    return json.loads((folder / "traffic.json").read_text())


def test_a_longer_row_sends_no_more(tmp_path):
    short, long = _traffic("ipttcd", tmp_path)
    assert short["collective-permute"] > 0
    assert long == short


def test_full_attention_alone_sends_all_keys(tmp_path):
    short, long = _traffic("full", tmp_path)
    assert long["collective-permute"] > 1.9 * short["collective-permute"]
