"""The GPU kernels without a GPU, against their definitions: those of all ops in Triton's
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
from ttcd_kernels import launch
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import mosaic_call
from ttcd_kernels.dual_window.cotangents import with_gradients
from ttcd_kernels.dual_window.tuning import Tile, Tuning
from ttcd_kernels.windows import Windows

from experiments.studies.kernels import attention, convolution, decoding, programs

# A case is a call, a small tile or the table's, and what the call is made into.
_DUAL = attention.Case("", 40, 2, 1, 32, 16, 8, dtype="float32")
_DECODE = decoding.Case("", 3, 4, 2, 32, 48, 20, num_slots=53, first_position=7, dtype="float32")
_CONV = convolution.Case("", 2, 2, 9, 5, 4, is_causal=True, dtype="float32")


def dual(block_m=16, block_n=16, change="", **changes):
    tile = Tile(block_m, block_n, 4, 2) if block_m else None
    return attention, _DUAL._replace(**changes), tile, change


def decode(block_n=16, slices=2, change="", **changes):
    case = _DECODE._replace(**changes)
    programs = case.batch * case.num_kv_heads * slices
    tile = decode_tuning.Tile(block_n, 4, 2, programs) if block_n else None
    return decoding, case, tile, change


def conv(change="", **changes):
    return convolution, _CONV._replace(**changes), None, change


CASES = [
    dual(),
    dual(teacher_window=100, student_window=1),  # beyond the row; the query alone
    dual(teacher_window=13, student_window=13, block_n=32),  # no far band
    dual(teacher_window=21, student_window=20, block_m=32),
    dual(scale=-0.3),
    # halo
    dual(batch=2, length=33, num_keys=50, num_heads=4, num_kv_heads=2, teacher_window=20),
    dual(length=5, num_kv_heads=2),  # less than a tile
    dual(head_dim=64, length=1, num_keys=37, block_n=32),  # the last query alone
    # columns padded to 128, with heads that follow one another in memory
    dual(head_dim=80, num_heads=4, num_kv_heads=2, length=33, num_keys=50, has_documents=True),
    dual(head_dim=96, num_kv_heads=2, length=24, dtype="bfloat16"),
    dual(0, head_dim=80, num_heads=3, length=37),
    # documents, in the second row such as come again
    dual(has_documents=True),
    dual(batch=2, num_keys=51, num_kv_heads=2, block_m=32, has_documents=True),
    dual(length=90, num_keys=130, teacher_window=90, student_window=40, has_documents=True),
    *[
        dual(change=name, length=24, num_heads=4, num_kv_heads=2)
        for name in ("jit", "remat", "vmap", "vmap, shared keys")
    ],
    dual(0, length=150, teacher_window=None, student_window=60),
    *[dual(dtype=dtype) for dtype in ("bfloat16", "float16")],
    # every position from a row that waits on, both windows' ends, the ring's edge; far beyond
    decode(batch=57, step=1, first_position=-1, num_heads=2, num_kv_heads=1),
    decode(first_position=2_000_000_011),
    decode(num_slots=48, slices=4),  # full
    decode(num_slots=1, teacher_window=1, student_window=1),
    decode(num_slots=100, teacher_window=33, student_window=16, block_n=32),
    *[decode(batch=1, num_heads=n, num_kv_heads=1, first_position=70) for n in (1, 2, 3, 17)],
    decode(student_window=48, slices=1),
    decode(student_window=1),
    decode(student_window=47, slices=5),
    decode(teacher_window=50, student_window=18, slices=4),
    *[decode(change=name, batch=2, step=83) for name in ("jit", "vmap", "vmap, shared keys")],
    # many slices, merged in several steps; the younger row has none in the far band
    decode(
        **{"batch": 2, "step": 895, "first_position": 5, "num_slots": 640, "slices": 40},
        **{"teacher_window": 620, "student_window": 340},
    ),
    # columns padded to 128
    decode(head_dim=80, batch=2, step=12),
    decode(head_dim=96, num_kv_heads=1, dtype="float16"),
    decode(0, head_dim=80, num_kv_heads=4),
    decode(0, head_dim=128),
    *[decode(dtype=dtype) for dtype in ("bfloat16", "float16")],
]
CONV_CASES = [
    conv(has_documents=True),
    conv(is_causal=False, num_taps=5, size=4.5e-4, zero_slope=1e6),  # norms on both sides of 1e-6
    conv(is_causal=False, num_taps=8, normalizes_keys=False, has_documents=True),
    # several tiles, spans and blocks of features
    conv(batch=1, num_chunks=1, chunk_size=130, num_features=130, dtype="bfloat16"),
    conv(has_documents=True, dtype="float16"),
    conv(change="by row"),
]
_WIDE = attention.Case("", 128, 2, 1, 64, 64, 32)
_HALF = _WIDE._replace(num_heads=1, student_window=90, dtype="float16", has_documents=True)
_SMALL = Tuning(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
# (tiles that are more than slots, or the table's; has gradients; call)
MOSAIC_CASES = [
    # Two sequences, grouped heads, ragged; windows and halo cut tiles, no query sees the first.
    (
        *(_SMALL, True),
        _WIDE._replace(batch=2, length=130, num_keys=290, teacher_window=31, student_window=17),
    ),
    # Far more tiles than slots.
    (_SMALL, False, _WIDE._replace(num_keys=440, num_heads=1, teacher_window=397)),
    # The teacher's window ends inside a query tile's halo.
    (None, False, _WIDE._replace(length=256, num_keys=300, num_heads=1, teacher_window=193)),
    # Beyond the row; the query alone.
    (
        *(None, True),
        _WIDE._replace(length=200, head_dim=128, num_heads=1, teacher_window=300, student_window=1),
    ),
    # No far band.
    (None, False, _WIDE._replace(length=256, head_dim=128, student_window=64)),
    # Documents of several tiles, of one key, cut by tiles, such as come again, with halo.
    (_SMALL, True, _HALF._replace(batch=2, length=330, num_keys=390, teacher_window=300)),
    # No far band.
    (None, True, _HALF._replace(length=256, teacher_window=200, student_window=200)),
]
# Of outputs, of gradients: a step of each dtype for a rounding of the weights and of the result.
MOSAIC_BOUNDS = {"bfloat16": (2**-8, 2**-7), "float16": (2**-11, 2**-10)}


@pytest.fixture(scope="module")
def interpreted():
    """What is printed for each case."""
    lines = printed(__file__, "triton", count=1, TRITON_INTERPRET="1").splitlines()
    return [*map(json.loads, lines)]


def test_tritons_results_and_gradients_are_those_of_the_definition(interpreted):
    cases = CASES + CONV_CASES
    assert [*zip(cases, interpreted, strict=False)] == [(case, "") for case in cases]


def test_tritons_convolutions_have_the_bits_of_xlas(interpreted):
    """Whatever the operands, of difference and target; of keys where squares add up exactly."""
    for case, ulps in zip(CONV_CASES, interpreted[-len(CONV_CASES) :], strict=True):
        assert [x <= bound for x, bound in zip(ulps, (0, 0, 4, 0, 0, 0), strict=True)], case


def test_mosaics_results_are_those_of_the_definition_and_nothing_races():
    # XLA has NPROC threads; each warpgroup waits in one.
    output = printed(__file__, "mosaic", count=1, NPROC="8")
    assert "RACE DETECTED" not in output, output[:3000]
    for case, line in zip(MOSAIC_CASES, output.splitlines(), strict=True):
        of_outs, of_gradients = MOSAIC_BOUNDS[case[2].dtype]
        for name, error in json.loads(line).items():
            bound = of_gradients if name[:2] in ("dq", "dk", "dv") else of_outs
            assert error < (2e-6 if name.endswith("lse") else bound), (case, line)


def _mapped(is_shared, run):
    """`run` by vmap over kv heads, or over the query heads of each, which share its keys."""

    def mapped(q, k, v):
        (*rows, N, H), K = q.shape, k.shape[2]
        of_q, of_keys = (-2, None) if is_shared else (-3, -3)
        keys = (k, v) if is_shared else (k[:, :, :, None], v[:, :, :, None])
        axes = (of_q, of_q, of_q + 1, of_q + 1)
        results = jax.vmap(run, (of_q, of_keys, of_keys), axes)(q.reshape(*rows, K, -1, H), *keys)
        return tuple(x.reshape(*rows, N, *x.shape[len(rows) + 2 :]) for x in results)

    return mapped


def _by_row(run):
    """The convolution `run` by vmap over the batch, of which each row has taps of the student."""

    def mapped(z_teacher, z_student, teacher_taps, student_taps):
        own = jnp.broadcast_to(student_taps, (len(z_student), *student_taps.shape))
        z = z_teacher[:, None], z_student[:, None]
        return tuple(x[:, 0] for x in jax.vmap(run, (0, 0, None, 0))(*z, teacher_taps, own))

    return mapped


_CHANGES = {"": lambda run: run, "jit": jax.jit, "remat": jax.checkpoint, "by row": _by_row}
_CHANGES |= {"vmap": partial(_mapped, False), "vmap, shared keys": partial(_mapped, True)}


def _mosaic(tiles, has_gradients, case):
    """Errors by name."""
    from jax.experimental.pallas import mosaic_gpu

    table = mosaic_call.MOSAIC_TILES
    mosaic_call.MOSAIC_TILES = table if tiles is None else {case.head_dim: tiles}
    options = {"interpret": mosaic_gpu.InterpretGPUParams(detect_races=True)}
    ids = None if case.ids is None else jnp.asarray(case.ids)
    forward, backward = (
        partial(x, case.windows, **options)
        for x in (mosaic_call.launch_forward, mosaic_call.launch_backward)
    )
    run = jax.jit(lambda *qkv: with_gradients(forward, backward, *qkv, ids))
    shapes = attention.operand_shapes(case)
    operands = [draw(i, x.shape, dtype=x.dtype)[0] for i, x in enumerate(shapes)]
    direction = programs.directions(attention, case)["fwd + bwd" if has_gradients else "forward"]
    found = jax.device_get(jax.tree.leaves(direction(run)(*operands)))
    mosaic_call.MOSAIC_TILES = table
    expected = attention.expected(case, operands).items()
    assert [x.dtype.name for x in found[:4]] == [case.dtype] * 2 + ["float32"] * 2
    return {
        name: programs.relative_error(x, y) for (name, y), x in zip(expected, found, strict=False)
    }


def _ulps(_, case, __, change):
    """Of difference, target and key, beside XLA's, on any numbers and on such whose sums are exact.
    Products are exact in float32, so that none is rounded otherwise where a sum takes it in."""
    found, shapes = [], convolution.operand_shapes(case)[: convolution.INPUTS]
    runs = convolution.implementations(case._replace(size=1.0))
    drawn = [draw(i, x.shape, dtype="bfloat16")[0] for i, x in enumerate(shapes)]
    for operands in drawn, [jnp.round(2 * x).clip(-4, 4) / 4 for x in drawn]:
        given = [x.astype(case.dtype) for x in operands]
        results = (_CHANGES[change](runs[name])(*given) for name in ("triton", "xla"))
        found += [int(programs.ulps(*map(np.asarray, x)).max()) for x in zip(*results, strict=True)]
    return found


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


def test_an_assembler_that_is_wrong_about_masks_is_refused(monkeypatch):
    for version, is_refused in ((12_060, False), (12_090, True), (13_000, False)):
        monkeypatch.setattr(mosaic_call, "_toolkit", lambda version=version: version)
        with launch.compiling_for(90):
            assert (f"CUDA {version}" in str(mosaic_call.unsupported(*_shapes(8, 2, 1, 64)))) == (
                is_refused
            )


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    if sys.argv[1] == "mosaic":
        for case in MOSAIC_CASES:
            print(json.dumps(_mosaic(*case)), flush=True)
    else:
        import triton_interpreter

        triton_interpreter.install()
        programs.BOUNDS["float32"] = 2e-6
        for op, case, tile, change in CASES + CONV_CASES:
            print(json.dumps(triton_interpreter.note(op, case, tile, _CHANGES[change])), flush=True)
        with launch.compiling_for(90):
            for case in CONV_CASES:
                print(json.dumps(_ulps(*case)), flush=True)
