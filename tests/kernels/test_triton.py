"""The Triton kernels without a GPU: both ops against their definitions by Triton's interpreter, and
kernels that are broken on purpose.

Run as a program, the file prints a JSON line for each case: the interpreter needs its own process.
"""

import json
import re
from functools import partial

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import draw
from devices import printed
from ttcd_kernels import check, decode_attention_with_lse, dual_window_attention_with_lse, launch
from ttcd_kernels.decode import triton_call as decode_call
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import triton_call as dual_window_call
from ttcd_kernels.dual_window import tuning as dual_window_tuning
from ttcd_kernels.windows import Windows

# A case is a call of the kernels with a small tile, or (`is_public`) as users make it.
DUAL = {"T": 40, "S": 40, "N": 2, "K": 1, "H": 32, "teacher": 16, "student": 8}
# A row that waits, the beginning, both windows' ends, the ring's edge, far beyond.
PHASES = [-1, 0, 5, 19, 20, 47, 48, 52, 53, 54, 110, 2_000_000_011]
DECODE = {
    **{"positions": [7, 60, 1_000_003], "N": 4, "K": 2, "H": 32, "W": 53},
    **{"teacher": 48, "student": 20, "slices": 2, "block_n": 16},
}
DUAL_CASES = [
    DUAL,
    DUAL | {"teacher": 100, "student": 1},  # beyond the row; the query alone
    DUAL | {"teacher": 13, "student": 13, "block_n": 32},  # no far band
    DUAL | {"teacher": 21, "student": 20, "block_m": 32},
    DUAL | {"scale": -0.3},
    DUAL | {"B": 2, "T": 33, "S": 50, "N": 4, "K": 2, "teacher": 20, "student": 7},  # halo
    DUAL | {"T": 5, "S": 5, "K": 2},  # less than a tile
    DUAL | {"H": 64, "T": 1, "S": 37, "block_n": 32},  # the last query alone
    # columns padded to 128, with heads that follow one another in memory
    DUAL | {"H": 80, "N": 4, "K": 2, "T": 33, "S": 50, "documents": 3},
    DUAL | {"H": 96, "N": 2, "K": 2, "T": 24, "S": 24, "dtype": "bfloat16"},
    DUAL | {"H": 80, "N": 3, "K": 1, "T": 37, "S": 37, "is_public": True},
    DUAL | {"documents": 4},
    DUAL | {"B": 2, "S": 51, "documents": 9, "K": 2, "block_m": 32},
    DUAL | {"documents": 3, "T": 90, "S": 130, "teacher": 90, "student": 40},
    DUAL | {"B": 2, "documents": 2, "is_mixed": True, "teacher": 30},
    *[DUAL | {"transform": name, "T": 24, "S": 24} for name in ("jit", "remat", "vmap")],
    DUAL | {"is_public": True, "T": 150, "S": 150, "teacher": None, "student": 60},
    *[DUAL | {"dtype": dtype} for dtype in ("bfloat16", "float16")],
]
DECODE_CASES = [
    DECODE | {"positions": PHASES, "K": 1, "N": 2},
    DECODE | {"W": 48, "slices": 4},  # full
    DECODE | {"W": 1, "teacher": 1, "student": 1},
    DECODE | {"W": 100, "teacher": 33, "student": 16, "block_n": 32},
    *[DECODE | {"N": group, "K": 1, "positions": [70]} for group in (1, 2, 3, 17)],
    DECODE | {"student": 48, "slices": 1},
    DECODE | {"student": 1},
    DECODE | {"student": 47, "slices": 5},
    DECODE | {"teacher": 50, "student": 18, "slices": 4},
    *[
        DECODE | {"transform": name, "positions": [7, 90]}
        for name in ("jit", "vmap", "vmap, shared caches")
    ],
    # many slices, merged in several steps; the younger row has none in the far band
    DECODE | {"positions": [5, 900], "W": 640, "teacher": 620, "student": 340, "slices": 40},
    # columns padded to 128
    DECODE | {"H": 80, "positions": PHASES[:4]},
    DECODE | {"H": 96, "K": 1, "dtype": "float16"},
    DECODE | {"H": 80, "K": 4, "is_public": True},
    DECODE | {"is_public": True, "H": 128},
    *[DECODE | {"dtype": dtype} for dtype in ("bfloat16", "float16")],
]
CASES = DUAL_CASES + DECODE_CASES
# A relative step of each dtype; sums over up to 60 keys, probabilities rounded once. Log-sum-exps
# are sums in float32 of exact products.
DUAL_BOUNDS = {"float32": 2e-6, "bfloat16": 3e-2, "float16": 3e-3}
DECODE_BOUNDS = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
JOB = check.Job("dual_window", "triton", "bfloat16", "200, full/1 H2/1 D32")
FAULTS = {
    "none": "",
    "sign": r"failed: error \d.*, allowed 3e-02",
    "row": "failed: error nan, allowed 3e-02",
}


@pytest.fixture(scope="module")
def results():
    output = printed(__file__, count=1, TRITON_INTERPRET="1")
    return [*map(json.loads, output.splitlines())]


def test_results_and_gradients_are_those_of_the_definition(results):
    for case, errors in zip(CASES, results, strict=False):
        dtype, bounds = case.get("dtype", "float32"), DUAL_BOUNDS if "T" in case else DECODE_BOUNDS
        # One by one: `max` passes over NaN, the value of an unwritten result.
        for name, error in errors.items():
            assert error < bounds["float32" if name.endswith("lse") else dtype], (case, errors)


def test_a_kernel_that_is_broken_on_purpose_fails_the_check(results):
    for note, row in zip(FAULTS.values(), results[len(CASES) :], strict=True):
        assert re.fullmatch(note, row["note"]), row
        assert [row[name] for name in JOB._fields] == [*JOB]


def _dual_window(case):
    """(kernels, definition, operands, cotangents) of a case."""
    B, (T, S, N, K, H) = case.get("B", 1), (case[name] for name in "TSNKH")
    q, k, lse = (B, T, N, H), (B, S, K, H), (B, T, N)
    *operands, d_teacher, d_student = draw(0, q, k, k, q, q, dtype=case.get("dtype", "float32"))
    ids = None
    if case.get("documents"):
        ids = np.random.default_rng(1).integers(0, case["documents"], (B, S))
        ids = jnp.asarray(ids if case.get("is_mixed") else np.sort(ids, 1), jnp.int32)
    windows = Windows(case["teacher"] or S, case["student"], case.get("scale", H**-0.5))
    tile = dual_window_tuning.Tile(case.get("block_m", 16), case.get("block_n", 16), 4, 2)
    static = {"segment_ids": ids, "windows": windows}
    tuning = dual_window_tuning.Tuning(*[tile] * 3)
    kernels = partial(dual_window_call.dual_window, **static, tuning=tuning)
    if case.get("is_public"):
        kernels = partial(_public(case, dual_window_attention_with_lse), segment_ids=ids)
    cotangents = d_teacher, d_student, *draw(2, lse, lse, dtype="float32")
    return kernels, partial(definitions.dual_window, **static), operands, cotangents


def _decode(case):
    """As `_dual_window`. Slots out of sight hold numbers as large as the others, so that seeing one
    shows."""
    B, (N, K, H, W) = len(case["positions"]), (case[name] for name in "NKHW")
    operands = draw(0, (B, N, H), *[(B, W, K, H)] * 2, dtype=case.get("dtype", "float32"))
    windows = Windows(case["teacher"], case["student"], H**-0.5)
    tile = decode_tuning.Tile(case["block_n"], 4, 2, B * K * case["slices"])
    kernels = partial(decode_call.decode, windows=windows, tuning=decode_tuning.Tuning(tile))
    if case.get("is_public"):
        kernels = _public(case, decode_attention_with_lse)
    operands.append(jnp.asarray(case["positions"], jnp.int32))
    return kernels, partial(definitions.decode, windows=windows), operands, ()


def _public(case, call):
    windows = {"teacher_window": case["teacher"], "student_window": case["student"]}
    return partial(call, **windows, implementation="triton")


def _errors(case):
    """By result and gradient, against the definition in float64 on the same (rounded) operands,
    under vmap with the definition under vmap."""
    call, definition, operands, cotangents = (_dual_window if "T" in case else _decode)(case)
    transform = case.get("transform", "")
    if transform.startswith("vmap"):
        axes = [None if "shared" in transform and i in (1, 2) else 0 for i in range(len(operands))]
        call, definition = jax.vmap(call, axes), jax.vmap(definition, axes)
        two = [jnp.stack([jnp.roll(x, 1, 0), x]) for x in operands]
        operands = [x if a is None else y for x, y, a in zip(operands, two, axes, strict=True)]
        cotangents = [jnp.stack([jnp.roll(x, 1, 0), x]) for x in cotangents]
    call = {"jit": jax.jit, "remat": jax.checkpoint}.get(transform, lambda call: call)(call)

    def run(function, operands, cotangents):
        if not cotangents:
            return function(*operands)
        results, pull = jax.vjp(function, *operands)
        return *results, *pull(tuple(cotangents))

    found = run(call, operands, cotangents)
    arrays = jax.tree.map(
        lambda x: x.astype(float) if x.dtype != jnp.int32 else x, (operands, cotangents)
    )
    expected = jax.jit(partial(run, definition))(*arrays)
    if cotangents:
        assert [x.dtype for x in found] == [x.dtype for x in (*cotangents, *operands)]
        assert all(np.isfinite(x).all() for x in expected)
    names = ("teacher", "student", "teacher_lse", "student_lse", "dq", "dk", "dv")
    return {name: _error(x, y) for name, x, y in zip(names, found, expected, strict=False)}


def _error(found, expected):
    """max |a - b| / max |b| of two arrays; infinities, the log-sum-exps of rows that see nothing,
    must be at the same places. In NumPy: XLA's maximum on a CPU may pass over a NaN in bfloat16."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    both = np.isneginf(found) & np.isneginf(expected)
    found, expected = np.where(both, 0, found), np.where(both, 0, expected)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _broken(fault):
    """The row of a check whose launches have a fault: the sign of one band's cotangents (operand 5
    of both backward kernels, [2, B, T, N, H]), or a row that is not a number."""
    interpreted = launch.launch

    def launch_one(kernel, *args, **options):
        args, name = [*args], kernel.__name__
        if (fault, name) == ("sign", "dual_window_backward_kv"):
            args[5] = args[5].at[1].multiply(-1)
        results = interpreted(kernel, *args, **options)
        if (fault, name) == ("row", "dual_window_forward"):
            results[0] = results[0].at[0, 7].set(np.nan)
        return results

    launch.launch = launch_one
    row = check.checked(JOB)
    launch.launch = interpreted
    return row


if __name__ == "__main__":
    import triton_interpreter

    triton_interpreter.install()
    with launch.compiling_for(90):
        with jax.enable_x64(True):
            for case in CASES:
                print(json.dumps(_errors(case)), flush=True)
        for fault in FAULTS:
            print(json.dumps(_broken(fault)), flush=True)
