"""The Mosaic kernel for Hopper without a GPU: numerics by JAX's simulator of shared memory and
barriers, gradients, lowering, refusals.

Run as a program, the file prints a JSON line of errors for each case: the simulator needs its own
process, with a thread for every warpgroup.
"""

import json
import re
from functools import partial

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw, refused
from devices import printed
from jax.experimental.pallas import mosaic_gpu
from ttcd_kernels import launch
from ttcd_kernels.dual_window import mosaic_call, xla
from ttcd_kernels.dual_window.cotangents import with_gradients
from ttcd_kernels.dual_window.tuning import MOSAIC_TILES, MosaicTile, MosaicTuning
from ttcd_kernels.windows import Windows

KERNELS = ["dual_window_forward", "dual_window_backward_q", "dual_window_backward_kv"]
BASE = {"T": 128, "S": 128, "N": 2, "K": 1, "H": 64, "teacher": 64, "student": 32}
NARROW = {"tiles": [(128, 64, 2), (128, 64, 2), (64, 128, 2)]}  # more tiles than slots
FORWARD = {"has_gradients": False}
HALF = BASE | {"N": 1, "teacher": 200, "student": 90, "dtype": "float16"}
CASES = [
    # Two sequences, grouped heads, ragged; windows and halo cut tiles, no query sees the first.
    BASE | NARROW | {"B": 2, "T": 130, "S": 290, "teacher": 31, "student": 17},
    # Far more tiles than slots.
    BASE | NARROW | FORWARD | {"S": 440, "N": 1, "teacher": 397, "student": 130},
    # The table's tile; the teacher's window ends inside a query tile's halo.
    BASE | FORWARD | {"T": 256, "S": 300, "N": 1, "teacher": 193, "student": 128},
    # Beyond the row; the query alone.
    BASE | {"T": 200, "S": 200, "H": 128, "N": 1, "teacher": 300, "student": 1},
    # No far band.
    BASE | FORWARD | {"T": 256, "S": 256, "H": 128, "teacher": 128, "student": 128},
    # Documents of several tiles, of one key, cut by tiles, with halo and a ragged end.
    HALF | NARROW | {"B": 2, "T": 330, "S": 390, "teacher": 300, "documents": [256, 1, 70, 63]},
    # Ids that come again; no far band.
    HALF | {"T": 256, "S": 256, "student": 200, "documents": [90, 1, 165], "ids": [3, 1, 3]},
]
# A step of each dtype at 1: outputs are averages, of weights rounded once. Of gradients, two at the
# largest.
STEP = {"bfloat16": 2**-7, "float16": 2**-10}


def _segment_ids(case):
    """[B, S]; in further rows the documents are in reverse order."""
    if "documents" not in case:
        return None
    lengths = case["documents"]
    rows = [np.repeat(case.get("ids", range(len(lengths))), lengths)]
    rows += [np.repeat(range(len(lengths)), lengths[::-1])] * (case.get("B", 1) - 1)
    return jnp.asarray(np.stack(rows), jnp.int32)


NAMES = "teacher", "student", "teacher_lse", "student_lse", "dq", "dk", "dv"


def _errors(case):
    """Of results and gradients, against the definition in float64."""
    B, T, S, N, K, H = (case.get(name, 1) for name in "BTSNKH")
    dtype, ids = case.get("dtype", "bfloat16"), _segment_ids(case)
    q, k, row = (B, T, N, H), (B, S, K, H), (B, T, N)
    operands = draw(0, q, k, k, dtype=dtype)
    cotangents = *draw(1, q, q, dtype=dtype), *draw(2, row, row, dtype="float32")
    windows = Windows(case["teacher"], case["student"], H**-0.5)
    tuning = MosaicTuning(*(MosaicTile(*tile) for tile in case.get("tiles", MOSAIC_TILES[H])))
    options = {"tuning": tuning, "interpret": mosaic_gpu.InterpretGPUParams(detect_races=True)}
    launches = (mosaic_call.launch_forward, mosaic_call.launch_backward)
    kernels = partial(with_gradients, *(partial(x, windows, **options) for x in launches))

    def run(call, operands, cotangents):
        results, pull = jax.vjp(call, *operands)
        return *results, *(pull(cotangents) if case.get("has_gradients", True) else ())

    found = jax.jit(partial(run, lambda *qkv: kernels(*qkv, ids)))(operands, cotangents)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), (operands, cotangents))
    definition = partial(definitions.dual_window, segment_ids=ids, windows=windows)
    expected = jax.jit(partial(run, definition))(*wide)
    dtypes = [dtype] * 2 + ["float32"] * 2 + [dtype] * 3
    errors = {}
    for name, x, y, its_dtype in zip(NAMES, found, expected, dtypes, strict=False):
        assert x.dtype == its_dtype
        # NumPy's maximum keeps a NaN.
        errors[name] = float(np.abs(np.asarray(x, np.float64) - y).max())
        errors[name] /= float(np.abs(y).max()) if name.startswith("d") else 1.0
    return errors


def test_results_are_those_of_the_definition_and_nothing_races():
    # XLA has NPROC threads; each warpgroup waits in one.
    output = printed(__file__, count=1, NPROC="8")
    assert "RACE DETECTED" not in output, output[:3000]
    for case, line in zip(CASES, output.splitlines(), strict=True):
        step = STEP[case.get("dtype", "bfloat16")]
        for name, error in json.loads(line).items():
            steps = 2e-6 / step if name.endswith("lse") else 2 if name.startswith("d") else 1
            assert error < steps * step, (case, line)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_gradients_pass_through_all_four_results(monkeypatch, transform):
    def define(windows, q, k, v, segment_ids):
        return definitions.dual_window(q, k, v, segment_ids, windows)

    monkeypatch.setattr(mosaic_call, "launch_forward", define)
    monkeypatch.setattr(mosaic_call, "launch_backward", xla.gradients)
    qkv = draw(0, (2, 1, 24, 4, 64), *[(2, 1, 40, 2, 64)] * 2)
    if transform is jax.jit:
        qkv = [x[0] for x in qkv]

    def gradients(module):
        call = partial(module.dual_window, segment_ids=None, windows=Windows(20, 7, 0.1))
        results, pull = jax.vjp(transform(call), *qkv)
        return pull(results)

    assert_close(*jax.jit(lambda: [gradients(x) for x in (mosaic_call, definitions)])())


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
def test_the_call_lowers_to_one_kernel_for_hopper_and_the_gradient_to_two_more(
    has_gradients, shapes, windows
):
    kernels = KERNELS[: 1 + 2 * has_gradients]
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


def test_what_the_kernel_cannot_take_is_refused_before_launch(monkeypatch):
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
    zeros = (jnp.zeros(x.shape, x.dtype) for x in qkv)
    windows, words = Windows(16, 8, -0.1), "scale is -0.1|above 0"
    refused(words, mosaic_call.dual_window, *zeros, None, windows, error=ValueError)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for case in CASES:
        print(json.dumps(_errors(case)), flush=True)
