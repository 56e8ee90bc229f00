"""The GPU kernels without a GPU, against their definitions: those of both ops in Triton's
interpreter, Mosaic's in JAX's simulator of shared memory and barriers, its lowering and refusals.

Run as a program with `triton` or `mosaic`, the file prints a JSON line for each case: both need
their own process, the simulator a thread for every warpgroup.
"""

import json
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import draw
from devices import printed
from ttcd_kernels import (
    decode_attention_with_lse,
    dual_window_attention_with_lse,
    launch,
    short_conv_residual,
)
from ttcd_kernels.decode import triton_call as decode_call
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import mosaic_call, triton_call
from ttcd_kernels.dual_window.cotangents import with_gradients
from ttcd_kernels.dual_window.tuning import MOSAIC_TILES, Tile, Tuning, tuning_for
from ttcd_kernels.windows import Windows

from experiments.studies.kernels import definition, programs
from experiments.studies.kernels.definition import NAMES

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
CONV = {"B": 2, "C": 2, "L": 9, "F": 5, "R": 4, "is_causal": True, "normalizes_keys": True}
CONV_CASES = [
    CONV | {"has_documents": True},
    CONV | {"is_causal": False, "zero_slope": 3.0, "R": 5},
    CONV | {"normalizes_keys": False, "has_documents": True, "R": 8, "is_causal": False},
    # several tiles, spans and blocks of features
    CONV | {"B": 1, "C": 1, "L": 130, "F": 130, "dtype": "bfloat16"},
    CONV | {"dtype": "float16", "has_documents": True, "transform": "vmap"},
]
WIDE = {"T": 128, "S": 128, "N": 2, "K": 1, "H": 64, "teacher": 64, "student": 32}
WIDE |= {"dtype": "bfloat16"}
SMALL = {"tiles": [(128, 64, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2)]}  # more tiles than slots
FORWARD = {"has_gradients": False}
HALF = WIDE | {"N": 1, "teacher": 200, "student": 90, "dtype": "float16"}
MOSAIC_CASES = [
    # Two sequences, grouped heads, ragged; windows and halo cut tiles, no query sees the first.
    WIDE | SMALL | {"B": 2, "T": 130, "S": 290, "teacher": 31, "student": 17},
    # Far more tiles than slots.
    WIDE | SMALL | FORWARD | {"S": 440, "N": 1, "teacher": 397, "student": 130},
    # The table's tile; the teacher's window ends inside a query tile's halo.
    WIDE | FORWARD | {"T": 256, "S": 300, "N": 1, "teacher": 193, "student": 128},
    # Beyond the row; the query alone.
    WIDE | {"T": 200, "S": 200, "H": 128, "N": 1, "teacher": 300, "student": 1},
    # No far band.
    WIDE | FORWARD | {"T": 256, "S": 256, "H": 128, "teacher": 128, "student": 128},
    # Documents of several tiles, of one key, cut by tiles, with halo and a ragged end.
    HALF | SMALL | {"B": 2, "T": 330, "S": 390, "teacher": 300, "lengths": [256, 1, 70, 63]},
    # Ids that come again; no far band.
    HALF | {"T": 256, "S": 256, "student": 200, "lengths": [90, 1, 165], "ids": [3, 1, 3]},
]
# A relative step of each dtype; sums over up to 60 keys, probabilities rounded once. Log-sum-exps
# are sums in float32 of exact products.
DUAL_BOUNDS = {"float32": 2e-6, "bfloat16": 3e-2, "float16": 3e-3}
DECODE_BOUNDS = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
# Of Mosaic a step of each dtype at 1: outputs are averages, of weights rounded once. Of gradients,
# two at the largest.
STEP = {"bfloat16": 2**-7, "float16": 2**-10}


@pytest.fixture(scope="module")
def interpreted():
    """A line of each case."""
    lines = printed(__file__, "triton", count=1, TRITON_INTERPRET="1").splitlines()
    assert len(lines) == len(DUAL_CASES + DECODE_CASES + CONV_CASES)
    return lines


def test_tritons_results_and_gradients_are_those_of_the_definition(interpreted):
    for case, line in zip(DUAL_CASES + DECODE_CASES, interpreted, strict=False):
        errors = json.loads(line)
        dtype, bounds = case.get("dtype", "float32"), DUAL_BOUNDS if "T" in case else DECODE_BOUNDS
        # One by one: `max` passes over NaN, the value of an unwritten result.
        for name, (error, _) in errors.items():
            assert error < bounds["float32" if name.endswith("lse") else dtype], (case, errors)


def test_tritons_convolutions_have_the_bits_of_xlas_and_their_gradients(interpreted):
    """Whatever the operands, of target and difference; of keys where squares add up exactly."""
    for case, line in zip(reversed(CONV_CASES), reversed(interpreted), strict=False):
        ulps, exact_ulps, *errors = json.loads(line)
        assert [*ulps[:2], *exact_ulps] == [0] * 5, case
        assert ulps[2] <= 4, case
        assert max(errors) < DUAL_BOUNDS[case.get("dtype", "float32")], (case, errors)


def test_mosaics_results_are_those_of_the_definition_and_nothing_races():
    # XLA has NPROC threads; each warpgroup waits in one.
    output = printed(__file__, "mosaic", count=1, NPROC="8")
    assert "RACE DETECTED" not in output, output[:3000]
    for case, line in zip(MOSAIC_CASES, output.splitlines(), strict=True):
        step = STEP[case["dtype"]]
        for name, (relative, absolute) in json.loads(line).items():
            bound = 2e-6 if name.endswith("lse") else 2 * step if name.startswith("d") else step
            assert (relative if name.startswith("d") else absolute) < bound, (case, line)


def _dual_window(case):
    """(kernels, definition, operands, cotangents) of a case. Further rows have their documents in
    reverse order where their `lengths` are given."""
    B, (T, S, N, K, H) = case.get("B", 1), (case[name] for name in "TSNKH")
    q, k, lse = (B, T, N, H), (B, S, K, H), (B, T, N)
    *operands, d_teacher, d_student = draw(0, q, k, k, q, q, dtype=case.get("dtype", "float32"))
    ids = None
    if case.get("documents"):
        ids = np.random.default_rng(1).integers(0, case["documents"], (B, S))
        ids = ids if case.get("is_mixed") else np.sort(ids, 1)
    if case.get("lengths"):
        names, lengths = range(len(case["lengths"])), case["lengths"]
        ids = np.tile(np.repeat(names, lengths[::-1]), (B, 1))
        ids[0] = np.repeat(case.get("ids", names), lengths)
    windows = Windows(case["teacher"] or S, case["student"], case.get("scale", H**-0.5))
    expected = partial(definition.dual_window, ids=ids, windows=windows)
    ids = None if ids is None else jnp.asarray(ids, jnp.int32)
    tuning = Tuning(*[Tile(case.get("block_m", 16), case.get("block_n", 16), 4, 2)] * 3)
    triton_call.tuning_for = lambda *_: tuning
    kernels = partial(triton_call.dual_window, segment_ids=ids, windows=windows)
    if case.get("is_public"):
        triton_call.tuning_for = tuning_for
        kernels = partial(_public(case, dual_window_attention_with_lse), segment_ids=ids)
    if case in MOSAIC_CASES:
        from jax.experimental.pallas import mosaic_gpu

        tuning = Tuning(*(Tile(*tile) for tile in case.get("tiles", MOSAIC_TILES[H])))
        mosaic_call.MOSAIC_TILES = {H: tuning}
        options = {"interpret": mosaic_gpu.InterpretGPUParams(detect_races=True)}
        launches = (mosaic_call.launch_forward, mosaic_call.launch_backward)
        forward, backward = (partial(x, windows, **options) for x in launches)
        kernels = jax.jit(lambda *qkv: with_gradients(forward, backward, *qkv, ids))
    cotangents = d_teacher, d_student, *draw(2, lse, lse, dtype="float32")
    return kernels, expected, operands, cotangents


def _decode(case):
    """As `_dual_window`. Slots out of sight hold numbers as large as the others, so that seeing one
    shows."""
    B, (N, K, H, W) = len(case["positions"]), (case[name] for name in "NKHW")
    operands = draw(0, (B, N, H), *[(B, W, K, H)] * 2, dtype=case.get("dtype", "float32"))
    windows = Windows(case["teacher"], case["student"], H**-0.5)
    tile = decode_tuning.Tile(case["block_n"], 4, 2, B * K * case["slices"])
    decode_call.tuning_for = lambda *_: decode_tuning.Tuning(tile)
    kernels = partial(decode_call.decode, windows=windows)
    if case.get("is_public"):
        decode_call.tuning_for = decode_tuning.tuning_for
        kernels = _public(case, decode_attention_with_lse)
    operands.append(jnp.asarray(case["positions"], jnp.int32))
    return kernels, partial(definition.decode, windows=windows), operands, ()


def _public(case, call):
    windows = {"teacher_window": case["teacher"], "student_window": case["student"]}
    return partial(call, **windows, implementation="triton")


def _errors(case):
    """By result and gradient, against the definition in float64 on the same (rounded) operands, of
    each row of a vmap."""
    call, define, operands, cotangents = (_dual_window if "T" in case else _decode)(case)
    transform, given, n = case.get("transform", ""), [*operands, *cotangents], len(operands)
    rows = [given]
    if transform.startswith("vmap"):
        axes = [None if "shared" in transform and i in (1, 2) else 0 for i in range(len(given))]
        pairs = [*zip(given, axes, strict=True)]
        rows.insert(0, [x if a is None else jnp.roll(x, 1, 0) for x, a in pairs])
        given = [x if a is None else jnp.stack([jnp.roll(x, 1, 0), x]) for x, a in pairs]
        call = jax.vmap(call, axes[:n])
    call = {"jit": jax.jit, "remat": jax.checkpoint}.get(transform, lambda call: call)(call)
    if cotangents and case.get("has_gradients", True):
        results, pull = jax.vjp(call, *given[:n])
        found = *results, *pull(tuple(given[n:]))
    else:
        found = call(*given[:n])
    dtype = operands[0].dtype
    assert [x.dtype for x in found] == [dtype] * 2 + ["float32"] * 2 + [dtype] * (len(found) - 4)
    wide = [[np.asarray(x, None if x.dtype == "int32" else float) for x in row] for row in rows]
    expected = [np.stack(x) for x in zip(*(define(*row) for row in wide), strict=True)]
    if cotangents:
        assert all(np.isfinite(x).all() for x in expected)
    named = zip(NAMES, found, expected, strict=False)
    return {name: _errors_of(x, y.reshape(x.shape)) for name, x, y in named}


def _errors_of(found, expected):
    """(max |a - b| / max |b|, max |a - b|), equal infinities, the log-sum-exps of rows that see
    nothing, apart."""
    relative = programs.relative_error(np.asarray(found), expected)
    return relative, relative * float(np.abs(expected[np.isfinite(expected)]).max())


def _conv(case):
    """Ulps of the results beside XLA's, on any numbers and on such whose sums are exact, and the
    errors of the gradients beside XLA's in float64."""
    B, C, L, F, R = (case[name] for name in "BCLFR")
    z, taps, dtype = (B, C, L, F), (R, F), case.get("dtype", "float32")
    facts = {name: case[name] for name in ("is_causal", "normalizes_keys")}
    facts |= {"zero_slope": case.get("zero_slope", 1.0), "segment_ids": None}
    if case.get("has_documents"):
        facts["segment_ids"] = jnp.asarray(np.random.default_rng(0).integers(0, 2, (B, C, L)))
    triton, xla = (
        partial(short_conv_residual, **facts, implementation=x) for x in ("triton", "xla")
    )
    if case.get("transform"):
        triton, xla = (jax.vmap(x, (0, 0, None, 0)) for x in (triton, xla))
        z = (2, *z)
    # Products are exact in float32, so that none is rounded otherwise where a sum takes it in.
    operands = [x.astype(dtype) for x in draw(0, z, z, dtype="bfloat16")]
    operands += [x.astype("float32") for x in draw(1, taps, taps, dtype="bfloat16")]
    cotangents = tuple(draw(2, z, z, z, dtype=dtype))
    if case.get("transform"):
        operands[3] = jnp.stack([operands[3], -operands[3]])
    if "zero_slope" in case:
        operands[1] = operands[1].at[:, 0].set(0)
    exact = [jnp.round(2 * x).clip(-4, 4) / 4 for x in operands]

    @jax.jit
    def found(operands, exact, cotangents):
        results = [[run(*x) for run in (triton, xla)] for x in (operands, exact)]
        wide = jax.tree.map(lambda x: x.astype(float), (operands, cotangents))
        both = (triton, (operands, cotangents)), (xla, wide)
        return results, [jax.vjp(run, *arrays)[1](given) for run, (arrays, given) in both]

    results, gradients = jax.device_get(found(operands, exact, cotangents))
    ulps = [[int(programs.ulps(*x).max()) for x in zip(*pair, strict=True)] for pair in results]
    return *ulps, *map(programs.relative_error, *gradients)


def _shapes(length, num_heads, num_kv_heads, head_dim, dtype=jnp.bfloat16):
    q = jax.ShapeDtypeStruct((1, length, num_heads, head_dim), dtype)
    k = jax.ShapeDtypeStruct((1, length, num_kv_heads, head_dim), dtype)
    return q, k, k


@pytest.mark.parametrize(
    ("has_gradients", "shapes", "windows"),
    [
        (False, _shapes(65_536, 16, 8, 128), (8192, 4096)),  # of the paper
        (False, _shapes(32_768, 24, 24, 64), (2048, 1024)),  # from scratch
        (True, _shapes(1024, 2, 1, 64), (256, 128)),
    ],
)
def test_mosaic_lowers_to_one_kernel_for_hopper_and_the_gradient_to_two_more(
    has_gradients, shapes, windows
):
    kernels = [f"dual_window_{name}" for name in Tuning._fields[: 1 + 2 * has_gradients]]
    attend = partial(mosaic_call.dual_window, segment_ids=None, windows=Windows(*windows, 0.1))

    def call(*qkv):
        results, pull = jax.vjp(attend, *qkv)
        return pull(results) if has_gradients else results

    with launch.compiling_for(90):
        assert mosaic_call.unsupported(*shapes) is None
        text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\w+)", text) == ["mosaic_gpu_v2"] * len(kernels)
    assert [text.count(f"{name}_mosaic_gpu") for name in kernels] == [1] * len(kernels)
    assert has_gradients or "stablehlo.pad" not in text  # whole tiles need none


def test_what_mosaic_cannot_take_is_refused_before_launch(monkeypatch):
    qkv = _shapes(128, 2, 1, 64)

    def reason(*operands):
        return str(mosaic_call.unsupported(*operands))

    with launch.compiling_for(90):
        assert mosaic_call.unsupported(*qkv, None) is None
        assert "head dim 32 is not one of 64, 128" in reason(*_shapes(128, 2, 1, 32))
        wide, mixed = (_shapes(128, 2, 1, 64, dtype) for dtype in (jnp.float32, jnp.float16))
        assert "float32, float32, float32: they must be" in reason(*wide)
        assert "bfloat16, float16, float16" in reason(qkv[0], *mixed[1:])
        for version, is_refused in ((12_060, False), (12_090, True), (13_000, False)):
            monkeypatch.setattr(mosaic_call, "_toolkit", lambda version=version: version)
            assert (f"CUDA {version}" in reason(*qkv)) == is_refused
    for capability in (80, 100):
        with launch.compiling_for(capability):
            assert f"compute capability {capability}, not 90" in reason(*qkv)
    if jax.default_backend() != "gpu":
        assert "there is no NVIDIA GPU" in reason(*qkv)
    # A scale that turns the order of scores round.
    assert "scale is -0.1, the kernel needs one above 0" in reason(*qkv, None, Windows(16, 8, -0.1))


if __name__ == "__main__":
    if sys.argv[1] == "mosaic":
        jax.config.update("jax_enable_x64", True)
        for case in MOSAIC_CASES:
            print(json.dumps(_errors(case)), flush=True)
    else:
        import triton_interpreter

        triton_interpreter.install()
        with launch.compiling_for(90), jax.enable_x64(True):
            for case in DUAL_CASES + DECODE_CASES:
                print(json.dumps(_errors(case)), flush=True)
            for case in CONV_CASES:
                print(json.dumps(_conv(case)), flush=True)
