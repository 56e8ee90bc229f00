"""Machine code of the kernels, compiled without a GPU: registers, spills, shared memory, loops.

Of the GPUs that share rows of a table (tests/kernels/test_half_hour.py) 8.9 has the least shared
memory: every row is compiled for it, the largest head for the others. Heads of 80 and 96 have the
rows and, but for the constant of a mask, the code of one another: 96 is compiled for 9.0. The code
with documents has all that the code without has.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from ttcd_kernels import short_conv_residual
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import tuning as dual_window_tuning

from tests.machine_code import __main__ as machine_code
from tests.machine_code.__main__ import REGISTERS, SHARED_LIMIT, cases, compile_kernels

ATTENTION = ["dual_window_forward", "dual_window_backward_q", "dual_window_backward_kv"]
CODE = {x.name: x for x in cases("dual_window")}
DECODE = {case.name: case for case in cases("decode")}
ROWS = ("D32", "D64 documents", "D128")
# Bytes of each kernel, at most.
SPILLED = {"bfloat16": (0, 96, 96), "float16": (0, 96, 96), "float32": (512, 512, 512)}
BLACKWELL = (32, 128, 96)  # of 16 bits on 10.0, heads of 80 to 128
# Per 4,096 query-key pairs on Hopper: instructions of each of the eight warps in the loop without
# masks (dk and dv have one loop, with masks).
INSTRUCTIONS = {"D128": (175, 155, 400), "D64": (115, 130, 360)}
COMPILED = [
    *(("bfloat16", name, 90) for name in (*ROWS, "D64", "D96")),
    *itertools.product(("bfloat16", "float32"), ROWS, (89,)),
    *(("bfloat16", "D128", 120), ("bfloat16", "D128 documents", 100), ("float32", "D128", 90)),
]
# All that "auto" may take: `pytest -m slow tests/machine_code`, which other runs do not collect.
EVERY = [*itertools.product(SPILLED, CODE, SHARED_LIMIT)]


def pytest_generate_tests(metafunc):
    if "of_attention" in metafunc.fixturenames:
        rest = [x for x in EVERY if x not in COMPILED]
        rest = [pytest.param(x, marks=pytest.mark.slow) for x in rest]
        is_asked = metafunc.config.option.markexpr == "slow"
        metafunc.parametrize("of_attention", COMPILED + rest * is_asked)


def _fits(kernel, capability):
    assert kernel.shared_bytes <= SHARED_LIMIT[capability]
    assert kernel.registers * 32 * kernel.num_warps <= REGISTERS


def test_attention_fits_spills_nothing_in_the_forward_and_computes_no_product_twice(of_attention):
    dtype, name, capability = of_attention
    kernels = compile_kernels("dual_window", CODE[name]._replace(dtype=dtype), capability)
    assert [kernel.name for kernel in kernels] == ATTENTION
    is_wide = capability == 100 and dtype != "float32" and CODE[name].head_dim >= 80
    is_wide = is_wide and of_attention not in COMPILED
    bounds = BLACKWELL if is_wide else SPILLED[dtype]
    for kernel, bound in zip(kernels, bounds, strict=True):
        assert kernel.spill_bytes <= bound
        assert machine_code.tensor_core_instructions(kernel) > 0
        # The tiles of float32 are those of every GPU.
        _fits(kernel, 89 if dtype == "float32" else capability)
    if dtype == "bfloat16" and capability == 90 and name in INSTRUCTIONS:
        head_dim = CODE[name].head_dim
        tiles = dual_window_tuning.tuning_for(90, head_dim, 2)
        rows = zip(kernels, tiles, (2, 3, 4), INSTRUCTIONS[name], strict=True)
        for kernel, tile, products, bound in rows:
            pairs, found = tile.block_m * tile.block_n, machine_code.loops(kernel)
            assert kernel.num_warps == 8
            assert min(x.instructions for x in found) * 4096 / pairs <= bound
            assert {x.multiply_adds for x in found} == {products * pairs * head_dim}


def test_convolutions_fit_and_spill_nothing():
    """With all taps that they take, documents and norms."""
    z, taps = (jax.ShapeDtypeStruct(x, "bfloat16") for x in ((1, 2, 1024, 4096), (8, 4096)))
    options = {"is_causal": False, "normalizes_keys": True, "implementation": "triton"}
    options["segment_ids"] = jnp.zeros(z.shape[:3], "int32")

    def gradients(*operands):
        results, pull = jax.vjp(functools.partial(short_conv_residual, **options), *operands)
        return pull(results)

    for kernel in machine_code.compiled(gradients, [z, z, taps, taps], 90):
        assert kernel.name.startswith("short_conv_residual")
        assert kernel.spill_bytes == 0
        _fits(kernel, 89)


@pytest.mark.skipif(
    machine_code.missing_compiler() is not None, reason=str(machine_code.missing_compiler())
)
def test_mosaic_multiplies_by_warpgroups_and_spills_no_more():
    spilled = {  # bytes of each kernel
        **{"D64": (0, 96, 32), "D64 documents": (0, 264, 40)},
        **{"D128": (116, 0, 104), "D128 documents": (340, 0, 524)},
    }
    assert machine_code.mosaic_kernels().keys() == spilled.keys()
    for name, kernels in machine_code.mosaic_kernels().items():
        assert [kernel.name for kernel in kernels] == [f"{x}_mosaic_gpu_kernel" for x in ATTENTION]
        head_dim = CODE[name.split()[0]].head_dim
        # Two bands of two loops. An instruction sums over 16 numbers of the head or, in the values
        # and gradients, over 16 keys or queries.
        forward, backward_q, backward_kv = dual_window_tuning.MOSAIC_TILES[head_dim]
        # The values of a band's last tile are multiplied behind its loops.
        assert [kernel.ptx.count("wgmma.mma_async") for kernel in kernels] == [
            (4 * head_dim + 6 * forward.block_n) // 16,
            4 * (2 * head_dim + backward_q.block_n) // 16,
            4 * (2 * head_dim + 2 * backward_kv.block_m) // 16,
        ]
        for kernel, bound in zip(kernels, spilled[name], strict=True):
            assert kernel.spill_bytes <= bound
            _fits(kernel, 90)


UNUSUAL = [
    {"dtype": "float32"},
    {"dtype": "float32", "num_heads": 64, "num_kv_heads": 1},
    {"dtype": "float16", "num_heads": 17, "num_kv_heads": 1},
    {"num_heads": 64, "num_kv_heads": 1},
    # Scalars that are 1 become constants of the kernel.
    {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "teacher_window": 1, "student_window": 1},
]


@pytest.mark.parametrize(
    ("name", "capability", "changes"),
    [
        *itertools.product(DECODE, (90,), ({},)),
        *itertools.product(("D64", "D128"), (89,), ({}, UNUSUAL[0])),
        ("D128", 120, {}),
        *itertools.product(("D128",), (90,), UNUSUAL),
    ],
)
def test_decode_is_two_kernels_without_spills(name, capability, changes):
    case = DECODE[name]._replace(**changes)
    kernel, merging = compile_kernels("decode", case, capability)
    assert [kernel.name, merging.name] == ["decode_attention", "decode_merge"]
    assert kernel.spill_bytes == merging.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_LIMIT[capability]
    if capability != 90:
        _fits(kernel, capability)
    if not changes:
        assert machine_code.tensor_core_instructions(kernel) > 0
        # Two programs share a multiprocessor (of data centres: 8.0 has the rows of 8.9), with two
        # tiles of K and V each under way.
        tile = 2 * case.head_dim * decode_tuning.tuning_for(capability, case.head_dim, 2)[0].block_n
        assert 4 * tile <= kernel.shared_bytes <= SHARED_LIMIT[90 if capability >= 90 else 80] // 2
        assert kernel.registers <= REGISTERS // (2 * 4 * 32)
        assert merging.registers <= 64


def test_machine_code_is_reported_by_case(monkeypatch, capsys):
    monkeypatch.setattr(decode_tuning, "HEAD_DIMS", (32,))
    machine_code.main(["--op", "decode", "--capability", "80"])
    header, _, kernel, merging = capsys.readouterr().out.splitlines()
    assert header.split()[:7] == [
        *("variant", "name", "num_warps", "registers", "spill_bytes", "shared_bytes"),
        "tensor_core_instructions",
    ]
    assert kernel.split()[:2] == ["D32", "decode_attention"]
    assert merging.split()[:2] == ["D32", "decode_merge"]
