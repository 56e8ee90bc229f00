"""Freed memory stays with a process that computes on the CPU, unless its user says otherwise."""

import json
from pathlib import Path

import pytest

from tests.commands import cpu_environment, output

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
