"""The implementations of an op as programs: compiled on random operands, in both directions, and
compared with the op's definition."""

import contextlib
import fcntl
import functools
import math
import operator
import os
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Shaped, UInt
from ttcd_kernels import measure
from ttcd_kernels.measure import Row

type Program = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]  # a function, its operands
FAILED = "failed: "  # the note of an implementation that refused, or is wrong
# Of the largest error of a result over its largest magnitude, by its dtype: some steps of it.
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 1.5e-3}
# Errors of an implementation that does not take a shape: the others are still measured.
_REFUSALS = (NotImplementedError, RuntimeError, TypeError, ValueError, ExceptionGroup)


class Work(NamedTuple):
    """The least work of a call: arithmetic, and bytes read once and written once."""

    flops: float
    bytes: float


def directions(op: Any, case: Any) -> dict[str, Callable[..., Any]]:
    """By name what makes a function of all operands from one of the inputs: `forward` and, where
    the operands include cotangents, `fwd + bwd`: the results, and the gradients of the inputs."""
    n = op.INPUTS

    def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*operands: jax.Array) -> Any:
            results, pull = jax.vjp(function, *operands[:n])
            return results, pull(operands[n:][: len(results)])

        return run

    forward = {"forward": lambda function: lambda *operands: function(*operands[:n])}
    has_cotangents = len(op.operand_shapes(case)) > n
    return forward | ({"fwd + bwd": gradient} if has_cotangents else {})


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Inside, no other process of this user is: processes compile together, and time in turn."""
    with Path(tempfile.gettempdir(), f"ttcd_kernels_{os.getuid()}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def operands(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Random arrays, since zeros run faster on a GPU; drawn on the device, by its own generator."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(shapes))
    return [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)]


def ready[Name: Hashable](
    programs: Mapping[Name, Callable[..., Any]], shapes: Sequence[jax.ShapeDtypeStruct]
) -> tuple[dict[Name, tuple[int | None, str]], dict[Name, Callable[[], Any]]]:
    """Of each program the bytes of its temporaries (None where it refuses) and a note why it is not
    timed; and a call on random operands of those that fit in device memory, which have run once."""
    known, compiled, calls, limit = {}, {}, {}, measure.usable_bytes()
    for name, function in programs.items():
        try:
            program = jax.jit(function).lower(*shapes).compile()
        except _REFUSALS as error:
            known[name] = None, _refusal(error)
            continue
        fits = measure.needed_bytes(program) < limit
        note = "" if fits else f"memory only: does not fit in {measure.gibibytes(limit)}"
        known[name] = measure.temp_bytes(program), note
        compiled |= {name: program} if fits else {}
    arrays = operands(shapes) if compiled else []
    for name, program in compiled.items():
        try:
            jax.block_until_ready(program(*arrays))  # a launch may also be refused
            calls[name] = functools.partial(program, *arrays)
        except _REFUSALS as error:
            known[name] = known[name][0], _refusal(error)
    return known, calls


def _refusal(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{FAILED}{type(error).__name__}: {lines[0][:120]}"


def compare(op: Any, case: Any, names: Collection[str] = ()) -> list[Row]:
    """A row per implementation (of `names`, if any) that has all results of the definition: the
    result furthest from it for its dtype, of those of a call and, for a differentiable op, its
    gradients through all of them. Its note says that it has failed where an error is beyond the
    bound or not a number, it does not fit, or a second run has other bits."""
    shapes = op.operand_shapes(case)
    *_, (direction, make) = directions(op, case).items()  # a gradient returns results too

    def program(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: compared(case, jax.tree.leaves(make(run)(*arrays)))

    found = op.implementations(case).items()
    functions = {name: program(run) for name, run in found if not names or name in names}
    expected = op.expected(case, operands(shapes))
    known, calls = ready(functions, shapes)
    rows = []
    for name, (_, note) in known.items():
        found, again = (jax.device_get(calls[name]() if name in calls else []) for _ in range(2))
        if name in calls and len(found) != len(expected):
            continue
        note = note and FAILED + note.removeprefix(FAILED)
        of_results = [
            (math.inf if math.isnan(error) else error / bound, error, result, bound)
            for (result, y), x in zip(expected.items(), found, strict=False)
            for error, bound in [(relative_error(x, y), BOUNDS[x.dtype.name])]
        ]
        nothing = 0, None, None, None
        over, error, result, bound = max(of_results, key=operator.itemgetter(0), default=nothing)
        if over > 1:
            note = f"{FAILED}error {error:.2g} of {result}, allowed {bound:.2g}"
        elif any(x.tobytes() != y.tobytes() for x, y in zip(found, again, strict=True)):
            note = f"{FAILED}two runs differ"
        row = {"case": case.name, "dtype": case.dtype, "pass": direction, "implementation": name}
        rows.append(row | {"max rel. error": error, "of": result, "note": note})
    return rows


def compared(case: Any, arrays: Sequence[Any]) -> list[Any]:
    """All of the arrays [B, T or S, ...], or the last rows of the last one."""
    count = case.num_compared
    return [*arrays] if count is None else [x[-1:, -count:] for x in arrays]


def relative_error(
    found: Shaped[np.ndarray, "*shape"], expected: Shaped[np.ndarray, "*shape"]
) -> float:
    """The largest difference over the largest finite magnitude; if only zeros are expected,
    undivided; NaN without an element. Equal infinities do not differ."""
    if not found.size:
        return math.nan
    found, expected = (x.astype(np.float64) for x in (found, expected))
    with np.errstate(invalid="ignore"):
        difference = np.where(found == expected, 0, np.abs(found - expected)).max()
    magnitude = np.abs(expected[np.isfinite(expected)]).max(initial=0) or 1.0
    return float(difference / magnitude)


def ulps(
    found: Float[np.ndarray, "*shape"], expected: Float[np.ndarray, "*shape"]
) -> UInt[np.ndarray, "*shape"]:
    """Number of representable numbers between each element and the expected one, rounded to the
    dtype of `found`; unsigned."""
    ours, theirs = _ordered(found), _ordered(expected.astype(found.dtype))
    return np.where(ours > theirs, ours - theirs, theirs - ours).view(np.uint64)


def _ordered(x: np.ndarray) -> np.ndarray:
    """Floats as integers that count representable numbers."""
    integer = {2: np.int16, 4: np.int32, 8: np.int64}[x.dtype.itemsize]
    bits = x.view(integer).astype(np.int64)
    return np.where(bits < 0, np.iinfo(integer).min - bits, bits)
