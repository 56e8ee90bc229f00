"""Runs a kernel's cases through Triton's interpreter, which takes over a whole process."""

import functools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from devices import printed


def gradient(function, inputs, cotangents) -> tuple[jax.Array, ...]:
    """(*results, *gradients of the inputs) with these cotangents."""
    results, pull = jax.vjp(function, *inputs)
    return *results, *pull(tuple(cotangents))


def errors_of(op: str, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What `kernels/interpreted_<op>.py` prints for each case: relative errors by result."""
    script = Path(__file__).parent / "kernels" / f"interpreted_{op}.py"
    output = printed(str(script), json.dumps(cases), count=1)
    return [json.loads(line) for line in output.splitlines()]


def check_errors(op: str, cases: list[dict[str, Any]], bound: dict[str, float], *sums: str) -> None:
    """Every result of every case is within its dtype's bound; `sums`, of exact products of narrow
    numbers in float32, within that of float32."""
    for case, errors in zip(cases, errors_of(op, cases), strict=True):
        # One by one: `max` passes over NaN, the value of an unwritten result.
        allowed = bound[case.get("dtype", "float32")]
        assert all(error < allowed for error in errors.values()), (case, errors)
        assert all(errors[name] < bound["float32"] for name in sums), (case, errors)


def print_errors(errors: Callable[[dict[str, Any]], dict[str, float]]) -> None:
    """The program of an `interpreted_<op>.py`: the errors of every case, a line of JSON each."""
    jax.config.update("jax_enable_x64", True)
    _patch_the_language_once()
    for case in json.loads(sys.argv[1]):
        print(json.dumps(errors(case)), flush=True)


def _patch_the_language_once() -> None:
    """Triton's interpreter puts itself into its language before every call of a device function and
    takes itself out after a launch. Here it may stay: once for each module of kernels is enough."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function) -> interpreter._LangPatchScope:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    # A table of all types is made at every call.
    plain, by_element = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (
        plain(dtype) if dtype.scalar.is_ptr() else by_element(dtype.scalar)
    )


def relative_errors(names: Iterable[str], found, expected) -> dict[str, float]:
    return {name: relative_error(x, y) for name, x, y in zip(names, found, expected, strict=True)}


def relative_error(found, expected) -> float:
    """max |a - b| / max |b| of two arrays; infinities, the log-sum-exps of rows that see nothing,
    must be at the same places. In NumPy: XLA's maximum on a CPU may pass over a NaN in bfloat16."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    both = np.isneginf(found) & np.isneginf(expected)
    found, expected = np.where(both, 0, found), np.where(both, 0, expected)
    return float(np.abs(found - expected).max() / np.abs(expected).max())
