"""Errors of the implementations of an op, measured against XLA's in float64."""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped, UInt

from ttcd_kernels import measure
from ttcd_kernels.measure import FAILED, Row

Numbers = Float[np.ndarray, "*shape"]
_NOTHING = math.nan, math.nan, math.nan  # is compared: beyond every bound
BASELINE = "xla"  # name of the implementation that results and times are compared with
# Of `max rel. error`: some steps of the dtype at the largest result.
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def compare(op: Any, case: Any, names: Collection[str] | None = None) -> list[Row]:
    """A row per implementation (of `names`) whose results have the baseline's structure, on random
    operands: the worst over its results and, for a differentiable op, its gradients. Its note says
    that it has failed where an error is beyond the dtype's bound or not a number, or a second run
    has other bits.

    `% equal`: elements equal to the baseline's rounded to the dtype; `ulp (99 %)`: the units in the
    last place that 99 % of the elements are within; `max rel. error`: the largest difference over
    the largest magnitude.
    """
    shapes = op.operand_shapes(case)
    *_, (direction, make) = measure.directions(op, case).items()  # a gradient returns results too
    functions = {name: make(function) for name, function in op.implementations(case).items()}
    expected = _in_float64(functions[BASELINE], measure.operands(shapes))
    chosen = {name: functions[name] for name in functions if names is None or name in names}
    known, calls = measure.ready(chosen, shapes)
    rows = []
    for name in chosen:
        numbers, note = (None, None, None), known[name].note
        if name in calls:
            actual, again = (jax.device_get(calls[name]()) for _ in range(2))
            if jax.tree.structure(actual) != jax.tree.structure(expected):
                continue
            pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
            worst = [distance(x, y) for x, y in pairs] or [_NOTHING]
            equal, ulp, error = zip(*worst, strict=True)
            numbers = 100 * min(equal), max(ulp), float(np.max(error))
            note = _fault(case.dtype, numbers[-1], actual, again)
        row = {"case": case.name, "dtype": case.dtype, "pass": direction, "implementation": name}
        row |= zip(("% equal", "ulp (99 %)", "max rel. error"), numbers, strict=True)
        rows.append(row | {"note": note})
    return rows


def _fault(dtype: str, error: float, *runs: Any) -> str:
    bound = BOUNDS[dtype]
    if not error <= bound:
        return f"{FAILED}error {error:.2g}, allowed {bound:.0e}"
    same = jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), *runs)
    return "" if all(jax.tree.leaves(same)) else f"{FAILED}two runs differ"


def _in_float64(function: Any, arrays: list[jax.Array]) -> Any:
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(np.asarray(x), jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in arrays
        ]
        return jax.device_get(jax.jit(function)(*wide))


def distance(found: Numbers, expected: Numbers) -> tuple[float, float, float]:
    """(share of equal elements, ulp of 99 %, largest relative error) of `found`, in its dtype; NaN
    without an element."""
    if not found.size:
        return _NOTHING
    ulp = ulps(found, expected)
    error = relative_error(found, expected)
    return float((ulp == 0).mean()), float(np.quantile(ulp, 0.99)), error


def ulps(found: Numbers, expected: Numbers) -> UInt[np.ndarray, "*shape"]:
    """Number of representable numbers between each element and the expected one, rounded to the
    dtype of `found`; unsigned."""
    ours, theirs = _ordered(found), _ordered(expected.astype(found.dtype))
    return np.where(ours > theirs, ours - theirs, theirs - ours).view(np.uint64)


def relative_error(
    found: Shaped[np.ndarray, "*shape"], expected: Shaped[np.ndarray, "*shape"]
) -> float:
    """The largest difference over the largest magnitude; if only zeros are expected, undivided; NaN
    without an element."""
    if not found.size:
        return math.nan
    found, expected = (x.astype(np.float64) for x in (found, expected))
    return float(np.abs(found - expected).max() / (np.abs(expected).max() or 1.0))


def _ordered(x: np.ndarray) -> np.ndarray:
    """Floats as integers that count representable numbers."""
    integer = {2: np.int16, 4: np.int32, 8: np.int64}[x.dtype.itemsize]
    bits = x.view(integer).astype(np.int64)
    return np.where(bits < 0, np.iinfo(integer).min - bits, bits)
