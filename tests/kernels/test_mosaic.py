"""The Mosaic kernel for Hopper without a GPU: numerics by JAX's simulator of shared memory and
barriers, gradients, lowering, machine code where JAX's compiler for it is installed, refusals.

Run as a program with a list of cases, the file prints a JSON line of errors each: the simulator
needs its own process, with a thread for every warpgroup.
"""

import json
import re
import sys
from typing import Any

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw
from devices import printed
from jax.experimental.pallas import mosaic_gpu
from launched import launched_kernels
from ttcd_kernels import launch
from ttcd_kernels.dual_window import mosaic_aot, mosaic_call
from ttcd_kernels.dual_window.tuning import MOSAIC_TILES, MosaicTile
from ttcd_kernels.machine_code import REGISTERS, SHARED_LIMIT
from ttcd_kernels.windows import Windows

KERNELS = ["dual_window_forward"]
BASE = {"T": 128, "S": 128, "N": 2, "K": 1, "H": 64, "teacher": 64, "student": 32}
NARROW = {"tile": (128, 64, 2)}  # more tiles than slots in few tokens
SETS = {
    "shapes": [
        # Two sequences, grouped heads, halo, ragged; windows and halo cut tiles.
        BASE | NARROW | {"B": 2, "T": 130, "S": 200, "teacher": 100, "student": 37},
        # Far more tiles than slots.
        BASE | NARROW | {"S": 440, "N": 1, "teacher": 397, "student": 130, "dtype": "float16"},
        # The table's tile; the teacher's window ends inside a query tile's halo.
        BASE | {"T": 256, "S": 300, "N": 1, "teacher": 193, "student": 128},
    ],
    "windows": [
        # Beyond the row; the query alone.
        BASE | {"T": 200, "S": 200, "H": 128, "N": 1, "teacher": 300, "student": 1},
        # No far band.
        BASE | {"T": 256, "S": 256, "H": 128, "teacher": 128, "student": 128, "dtype": "float16"},
    ],
    "documents": [
        # Lengths: of several tiles, of one key, cut by tiles, with halo and a ragged end.
        BASE
        | NARROW
        | {"B": 2, "T": 330, "S": 390, "N": 1, "teacher": 300, "student": 90}
        | {"documents": [256, 1, 70, 63]},
        # Ids that come again.
        BASE
        | {"T": 256, "S": 256, "N": 1, "teacher": 200}
        | {"documents": [90, 1, 165]}
        | {"ids": [3, 1, 3]},
    ],
}
# A step of each dtype at 1: outputs are averages, of weights rounded once.
STEP = {"bfloat16": 2**-7, "float16": 2**-10}


def _operands(case):
    B, T, S, N, K, H = (case.get(name, 1) for name in "BTSNKH")
    return draw(0, (B, T, N, H), *[(B, S, K, H)] * 2, dtype=case.get("dtype", "bfloat16"))


def _segment_ids(case):
    """[B, S]; in further rows the documents are in reverse order."""
    if "documents" not in case:
        return None
    lengths = case["documents"]
    rows = [np.repeat(case.get("ids", range(len(lengths))), lengths)]
    rows += [np.repeat(range(len(lengths)), lengths[::-1])] * (case.get("B", 1) - 1)
    return jnp.asarray(np.stack(rows), jnp.int32)


def _errors(case):
    """Of (teacher, student, teacher lse, student lse), against the definition in float64."""
    q, k, v = _operands(case)
    ids = _segment_ids(case)
    windows = Windows(case["teacher"], case["student"], case["H"] ** -0.5)
    tile = MosaicTile(*case["tile"]) if "tile" in case else None
    simulator = mosaic_gpu.InterpretGPUParams(detect_races=True)
    found = mosaic_call.launch_forward(windows, q, k, v, ids, tile, simulator)
    q, k, v = (x.astype(jnp.float64) for x in (q, k, v))
    expected = definitions.dual_window(q, k, v, ids, windows)
    dtypes = [x.dtype.name for x in found]
    assert dtypes == [case.get("dtype", "bfloat16")] * 2 + ["float32"] * 2
    # NumPy's maximum keeps a NaN.
    pairs = ((np.asarray(x, np.float64), y) for x, y in zip(found, expected, strict=True))
    return [float(np.abs(x - y).max()) for x, y in pairs]


@pytest.mark.parametrize("name", SETS)
def test_results_are_those_of_the_definition_and_nothing_races(name):
    # XLA has NPROC threads; each warpgroup waits in one.
    output = printed(__file__, json.dumps(SETS[name]), count=1, NPROC="8")
    assert "RACE DETECTED" not in output, output[:3000]
    for case, line in zip(SETS[name], output.splitlines(), strict=True):
        bounds = [STEP[case.get("dtype", "bfloat16")]] * 2 + [2e-6] * 2
        for error, bound in zip(json.loads(line), bounds, strict=True):
            assert error < bound, (case, line)


def _define(windows, q, k, v, segment_ids=None):
    """The definition in place of the launch."""
    return definitions.dual_window(q, k, v, segment_ids, windows)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_gradients_pass_through_all_four_results(monkeypatch, transform):
    monkeypatch.setattr(mosaic_call, "launch_forward", _define)
    qkv = draw(0, (2, 1, 24, 4, 64), *[(2, 1, 40, 2, 64)] * 2)
    if transform is jax.jit:
        qkv = [x[0] for x in qkv]

    def gradients(implementation):
        def attend(q, k, v):
            return implementation(q, k, v, None, Windows(20, 7, 0.1))

        def loss(q, k, v):
            results = transform(attend)(q, k, v)
            return sum(((i + 1) * x**2).sum() for i, x in enumerate(results))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv)

    assert_close(gradients(mosaic_call.dual_window), gradients(definitions.dual_window))


def _shapes(length, num_heads, num_kv_heads, head_dim, dtype=jnp.bfloat16) -> tuple[Any, Any, Any]:
    q = jax.ShapeDtypeStruct((1, length, num_heads, head_dim), dtype)
    k = jax.ShapeDtypeStruct((1, length, num_kv_heads, head_dim), dtype)
    return q, k, k


@pytest.mark.parametrize(
    ("shapes", "windows"),
    [(_shapes(65_536, 16, 8, 128), (8192, 4096)), (_shapes(32_768, 24, 24, 64), (2048, 1024))],
    ids=["paper", "from scratch"],
)
def test_the_call_lowers_to_one_kernel_for_hopper(shapes, windows):
    def attend(q, k, v):
        return mosaic_call.dual_window(q, k, v, None, Windows(*windows, q.shape[-1] ** -0.5))

    with launch.compiling_for(90):
        assert mosaic_call.unsupported(*shapes) is None
        lowered = jax.jit(attend).trace(*shapes).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert re.findall(r"custom_call @(\w+)", text) == ["mosaic_gpu_v2"]
    assert text.count("dual_window_forward_mosaic_gpu") == 1
    assert "stablehlo.pad" not in text  # whole tiles need none


def test_the_gradient_adds_the_two_backward_kernels_of_triton():
    def gradient(q, k, v):
        def attend(q, k, v):
            return mosaic_call.dual_window(q, k, v, None, Windows(256, 128, 0.1))

        results, pull = jax.vjp(attend, q, k, v)
        return pull(results)

    launched = launched_kernels(gradient, *_shapes(1024, 2, 1, 64), capability=90)
    assert launched == ["dual_window_backward_q", "dual_window_backward_kv"]


@pytest.mark.skipif(mosaic_aot.unavailable() is not None, reason=str(mosaic_aot.unavailable()))
@pytest.mark.parametrize("head_dim", MOSAIC_TILES)
def test_machine_code_multiplies_by_warpgroups_and_spills_nothing(head_dim):
    # Two bands of three loops; 16 numbers of the head, then 16 keys, per instruction.
    block_kv = MOSAIC_TILES[head_dim].block_kv
    products = [6 * (head_dim // 16 + block_kv // 16)]
    for has_documents, kernels in mosaic_aot.compile_mosaic(head_dim).items():
        assert [kernel.name for kernel in kernels] == [f"{x}_mosaic_gpu_kernel" for x in KERNELS]
        assert [kernel.tensor_core_instructions for kernel in kernels] == products
        for kernel in kernels:
            # With documents some numbers that are the same in all tiles.
            assert kernel.spill_bytes <= 192 * has_documents
            assert kernel.registers * 3 * 128 <= REGISTERS
            assert kernel.shared_bytes <= SHARED_LIMIT[90]


def test_what_the_kernel_cannot_take_is_refused_before_launch(monkeypatch):
    qkv = _shapes(128, 2, 1, 64)

    def reason(*operands):
        return str(mosaic_call.unsupported(*operands))

    with launch.compiling_for(90):
        assert mosaic_call.unsupported(*qkv, None) is None
        assert "head dim 32 is not one of 64, 128" in reason(*_shapes(128, 2, 1, 32))
        assert "float32, float32, float32: they must be" in reason(
            *_shapes(128, 2, 1, 64, jnp.float32)
        )
        mixed = qkv[0], *_shapes(128, 2, 1, 64, jnp.float16)[1:]
        assert "bfloat16, float16, float16" in reason(*mixed)
        for version, is_refused in ((12_060, False), (12_090, True), (13_000, False)):
            monkeypatch.setattr(mosaic_call, "_toolkit", lambda version=version: version)
            assert (f"CUDA {version}" in reason(*qkv)) == is_refused
    for capability in (80, 100):
        with launch.compiling_for(capability):
            assert f"compute capability {capability}, not 90" in reason(*qkv)
    if jax.default_backend() != "gpu":
        assert "there is no NVIDIA GPU" in reason(*qkv)


def test_a_scale_that_turns_the_order_of_scores_round_is_refused():
    q, k, v = (jnp.zeros(x.shape, x.dtype) for x in _shapes(128, 2, 1, 64))
    with pytest.raises(ValueError, match=r"scale is -0.1, the Mosaic kernel needs one above 0"):
        mosaic_call.dual_window(q, k, v, None, Windows(16, 8, -0.1))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for case in json.loads(sys.argv[1]):
        print(json.dumps(_errors(case)), flush=True)
