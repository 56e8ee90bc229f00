"""Freed memory stays with a process that computes on the CPU, unless its user says otherwise."""

import json
import os
from pathlib import Path

import pytest

from tests.commands import cpu_environment, output
from ttcd_jax import allocation

PAGES = 64 * 2**20 // 4096


@pytest.mark.parametrize("variables", [{}, {"MALLOC_ARENA_MAX": "2"}])
def test_temporaries_are_not_mapped_again(variables):
    environment = cpu_environment(**variables)
    program = Path(__file__).parent / "allocation_run.py"
    faults = json.loads(output(program, is_forked=False, env=environment))
    if variables:
        assert min(faults) > PAGES // 2
    else:
        assert min(faults) < PAGES // 100


@pytest.mark.parametrize(
    ("platforms", "device", "expected"),
    [("cpu", "nvidiactl", True), ("cuda", "", False), ("", "", True), ("", "nvidiactl", False)],
)
def test_whether_jax_computes_on_the_cpu_alone(platforms, device, expected, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(allocation.Path, "exists", lambda path: path.name == device)
    assert allocation.is_cpu_alone() == expected


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({}, 0.92),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 0.5),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".8"}, 0.8),
    ],
)
def test_plans_count_on_the_share_that_xla_is_told_to_take(variables, share, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocation.os, "environ", os.environ | variables)
    allocation.take_device_memory()
    assert allocation.usable_bytes(80e9) == pytest.approx(share * 80e9 - 2**30)
    told = {name: os.environ[name] for name in os.environ if name.endswith("MEM_FRACTION")}
    assert told == (variables or {"XLA_CLIENT_MEM_FRACTION": "0.92"})
