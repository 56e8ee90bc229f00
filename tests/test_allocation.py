"""Freed memory stays with a process that computes on the CPU, unless its user says otherwise."""

import json
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
