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


def compare(op: Any, case: Any, names: Collection[str] = ()) -> list[Row]:
    """A row per implementation (of `names`, if any) whose results have the baseline's structure, on
    random operands: the worst over its results and, for a differentiable op, its gradients. Its
    note says that it has failed where an error is beyond the dtype's bound or not a number, or a
    second run has other bits.

    `% equal`: elements equal to the baseline's rounded to the dtype; `ulp (99 %)`: the units in the
    last place that 99 % of the elements are within; `max rel. error`: the largest difference over
    the largest magnitude.
    """
    shapes, bound = op.operand_shapes(case), BOUNDS[case.dtype]
    *_, (direction, make) = measure.directions(op, case).items()  # a gradient returns results too
    functions = {name: make(function) for name, function in op.implementations(case).items()}
    arrays = measure.operands(shapes)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in arrays]
        expected = jax.device_get(jax.jit(functions[BASELINE])(*wide))
    chosen = {name: run for name, run in functions.items() if not names or name in names}
    known, calls = measure.ready(chosen, shapes)
    rows = []
    for name, (_, note) in known.items():
        numbers = None, None, None
        if name in calls:
            found, again = (jax.device_get(calls[name]()) for _ in range(2))
            if jax.tree.structure(found) != jax.tree.structure(expected):
                continue
            leaves, others = jax.tree.leaves(found), jax.tree.leaves(again)
            worst = [*map(distance, leaves, jax.tree.leaves(expected))] or [_NOTHING]
            equal, ulp, error = zip(*worst, strict=True)
            numbers = 100 * min(equal), max(ulp), float(np.max(error))
            if not numbers[-1] <= bound:
                note = f"{FAILED}error {numbers[-1]:.2g}, allowed {bound:.0e}"
            elif any(x.tobytes() != y.tobytes() for x, y in zip(leaves, others, strict=True)):
                note = f"{FAILED}two runs differ"
        row = {"case": case.name, "dtype": case.dtype, "pass": direction, "implementation": name}
        row |= zip(("% equal", "ulp (99 %)", "max rel. error"), numbers, strict=True)
        rows.append(row | {"note": note})
    return rows


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
