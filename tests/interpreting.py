"""Runs a kernel's cases through Triton's interpreter, which takes over a whole process."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np


def errors_of(op: str, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What `kernels/interpreted_<op>.py` prints for each case: relative errors by result."""
    script = Path(__file__).parent / "kernels" / f"interpreted_{op}.py"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(cases)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_all_below(op: str, cases: list[dict[str, Any]], bound: float) -> None:
    for case, errors in zip(cases, errors_of(op, cases), strict=True):
        # One by one: `max` passes over NaN, which is what no program wrote.
        assert all(error < bound for error in errors.values()), (case, errors)


def print_errors(errors: Callable[[dict[str, Any]], dict[str, float]]) -> None:
    """The program of an `interpreted_<op>.py`: the errors of every case, a line of JSON each."""
    jax.config.update("jax_enable_x64", True)
    _remember_the_language()
    for case in json.loads(sys.argv[1]):
        print(json.dumps(errors(case)), flush=True)


def _remember_the_language() -> None:
    """Triton's interpreter looks through its whole language before every call of a device function:
    what there is to be found is the same each time."""
    import triton.language as tl
    from triton.runtime import interpreter

    @functools.cache
    def builtins(package) -> list[str]:
        return [name for name in dir(package) if tl.core.is_builtin(getattr(package, name))]

    def patch(package, builder, scope) -> None:
        for name in builtins(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def relative_error(found, expected) -> float:
    """max |a - b| / max |b| of two arrays; infinities, the log-sum-exps of rows that see nothing,
    must be at the same places. In NumPy: XLA's maximum on a CPU may pass over a NaN in bfloat16."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    both = np.isneginf(found) & np.isneginf(expected)
    found, expected = np.where(both, 0, found), np.where(both, 0, expected)
    return float(np.abs(found - expected).max() / np.abs(expected).max())
