"""How far the implementations of an op are from its definition in float64."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_kernels import measure

COLUMNS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("parity", "dtype", "pass", "implementation"), ()),
    **{"% equal": (0.01, ".1f"), "ulp (99 %)": (1, ".0f"), "max rel. error": (1, ".1e")},
    "note": (),
}


class Parity(NamedTuple):
    """One implementation in one direction: the worst of its results."""

    case: str
    dtype: str
    direction: str
    implementation: str
    equal_share: float  # elements that are the definition's, rounded to the dtype
    ulp: float  # 99 % of the elements are within so many units in the last place
    max_relative_error: float  # largest difference over the largest magnitude
    note: str = ""


def compare(op: Any, case: Any) -> list[Parity]:
    """Each implementation whose results have the definition's form, on random operands: results
    and, of a differentiable op, gradients."""
    arrays = measure.operands(op.operand_shapes(case))
    programs = measure.programs(op, case)
    direction = list(programs)[-1][0]  # the gradient's programs return the results as well
    expected = _in_float64(programs[direction, "reference"], arrays)
    rows = []
    for (its_direction, name), function in programs.items():
        if its_direction != direction or name == "reference":
            continue
        facts = case.name, case.dtype, direction, name
        try:
            found = jax.device_get(jax.jit(function)(*arrays))
        except measure.REFUSALS as error:
            rows.append(Parity(*facts, math.nan, math.nan, math.nan, measure.refusal(error)))
            continue
        if jax.tree.structure(found) != jax.tree.structure(expected):
            continue
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        equal, ulp, error = zip(*(distance(x, y) for x, y in pairs), strict=True)
        rows.append(Parity(*facts, min(equal), max(ulp), max(error)))
    return rows


def _in_float64(function: Any, arrays: list[jax.Array]) -> Any:
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(np.asarray(x), jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in arrays
        ]
        return jax.device_get(jax.jit(function)(*wide))


def distance(found: np.ndarray, expected: np.ndarray) -> tuple[float, float, float]:
    """(share of equal elements, ulp of 99 %, largest relative error) of `found` in its dtype."""
    ulp = ulps(found, expected)
    error = relative_error(found, expected)
    return float((ulp == 0).mean()), float(np.quantile(ulp, 0.99)), error


def ulps(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Number of representable numbers between each element and the expected one, rounded to the
    dtype of `found`; unsigned."""
    ours, theirs = _ordered(found), _ordered(expected.astype(found.dtype))
    return np.where(ours > theirs, ours - theirs, theirs - ours).view(np.uint64)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over the largest magnitude; against zeros the plain difference."""
    found, expected = (x.astype(np.float64) for x in (found, expected))
    return float(np.abs(found - expected).max() / (np.abs(expected).max() or 1.0))


def _ordered(x: np.ndarray) -> np.ndarray:
    """Floats as integers that count representable numbers."""
    integer = {2: np.int16, 4: np.int32, 8: np.int64}[x.dtype.itemsize]
    bits = x.view(integer).astype(np.int64)
    return np.where(bits < 0, np.iinfo(integer).min - bits, bits)
