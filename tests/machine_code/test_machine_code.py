"""Machine code of the kernels, compiled without a GPU: registers, spills, shared memory, loops."""

import itertools

import pytest
from ttcd_kernels.decode import bench as decode
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.dual_window import bench as dual_window
from ttcd_kernels.dual_window import tuning as dual_window_tuning
from ttcd_kernels.machine_code import REGISTERS, SHARED_LIMIT

from tests.machine_code import __main__ as machine_code
from tests.machine_code import mosaic
from tests.machine_code.counts import Counts, cases, compile_kernels

ATTENTION = ["dual_window_forward", "dual_window_backward_q", "dual_window_backward_kv"]
DECODE = ["decode_attention", "decode_merge"]
CODE = [case for case in cases(dual_window) if case.head_dim == 64 or not case.has_documents]


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        *itertools.product(CODE, (80, 89, 90, 120)),
        *((case, 100) for case in CODE if case.has_documents),  # each takes half a minute
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_attention_fits_and_spills_nothing_in_the_forward(case, capability):
    forward, backward_q, backward_kv = kernels = compile_kernels(dual_window, case, capability)
    assert [kernel.name for kernel in kernels] == ATTENTION
    assert forward.spill_bytes == 0
    assert max(backward_q.spill_bytes, backward_kv.spill_bytes) <= 64
    for kernel in kernels:
        assert kernel.shared_bytes <= SHARED_LIMIT[capability]
        assert kernel.registers * 32 * kernel.num_warps <= REGISTERS
        assert kernel.tensor_core_instructions > 0


# Per 4,096 query-key pairs on Hopper: instructions of each of the eight warps in the loop without
# masks (dk and dv have one loop, with masks), and the products that tensor cores compute.
@pytest.mark.parametrize(
    ("head_dim", "instructions"), [(128, (175, 155, 400)), (64, (115, 130, 360))]
)
def test_inner_loops_on_hopper_have_few_instructions_and_no_product_twice(head_dim, instructions):
    case = next(case for case in CODE if case.head_dim == head_dim)
    kernels = compile_kernels(dual_window, case, 90)
    for kernel, tile, products, bound in zip(
        kernels,
        dual_window_tuning.tuning_for(90, head_dim, 2),
        (2, 3, 4),
        instructions,
        strict=True,
    ):
        pairs = tile.block_m * tile.block_n
        assert kernel.num_warps == 8
        assert min(loop.instructions for loop in kernel.loops) * 4096 / pairs <= bound
        for loop in kernel.loops:
            assert loop.multiply_adds == products * pairs * head_dim


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        *itertools.product(CODE, (89, 120)),
        *(
            (case, gpu)
            for case in CODE
            if case.head_dim not in dual_window_tuning.PADDED
            for gpu in (80, 90)
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_attention_in_float32_uses_tensor_cores_and_fits_every_gpu(case, capability):
    kernels = compile_kernels(dual_window, case._replace(dtype="float32"), capability)
    assert [kernel.name for kernel in kernels] == ATTENTION
    for kernel in kernels:
        assert kernel.spill_bytes <= 2048
        assert kernel.shared_bytes <= min(SHARED_LIMIT.values())
        assert kernel.registers * 32 * kernel.num_warps <= REGISTERS
        assert kernel.tensor_core_instructions > 0


@pytest.mark.skipif(mosaic.unavailable() is not None, reason=str(mosaic.unavailable()))
@pytest.mark.parametrize(
    ("head_dim", "has_documents", "spilled"),  # bytes of each kernel
    [
        (64, False, (0, 96, 32)),
        (64, True, (0, 264, 40)),
        (128, False, (116, 0, 104)),
        (128, True, (340, 0, 524)),
    ],
)
def test_mosaic_multiplies_by_warpgroups_and_spills_no_more(head_dim, has_documents, spilled):
    kernels = mosaic.compile_mosaic(head_dim, has_documents)
    assert [kernel.name for kernel in kernels] == [f"{x}_mosaic_gpu_kernel" for x in ATTENTION]
    # Two bands of two loops. An instruction sums over 16 numbers of the head or, in the values
    # and gradients, over 16 keys or queries.
    forward, backward_q, backward_kv = dual_window_tuning.MOSAIC_TILES[head_dim]
    # The values of a band's last tile are multiplied behind its loops.
    assert [kernel.tensor_core_instructions for kernel in kernels] == [
        (4 * head_dim + 6 * forward.block_kv) // 16,
        4 * (2 * head_dim + backward_q.block_kv) // 16,
        4 * (2 * head_dim + 2 * backward_kv.block_q) // 16,
    ]
    for kernel, bound in zip(kernels, spilled, strict=True):
        assert kernel.spill_bytes <= bound
        assert kernel.registers * 3 * 128 <= REGISTERS
        assert kernel.shared_bytes <= SHARED_LIMIT[90]


@pytest.mark.parametrize("case", cases(decode), ids=lambda case: case.name)
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_decode_is_two_kernels_without_spills(capability, case):
    kernel, merging = compile_kernels(decode, case, capability)
    assert [kernel.name, merging.name] == DECODE
    assert kernel.spill_bytes == merging.spill_bytes == 0
    assert kernel.tensor_core_instructions > 0
    # Two programs share a multiprocessor (of data centres), with two tiles of K and V each under
    # way.
    programs = 2 if capability in (80, 90) else 1
    tile = 2 * case.head_dim * decode_tuning.tuning_for(capability, case.head_dim, 2)[0].block_n
    assert 4 * tile <= kernel.shared_bytes <= SHARED_LIMIT[capability] // programs
    assert kernel.registers <= REGISTERS // (2 * 4 * 32)
    assert merging.registers <= 64


UNUSUAL = [
    {"dtype": "float32"},
    {"dtype": "float32", "num_heads": 64, "num_kv_heads": 1},
    {"dtype": "float16", "num_heads": 17, "num_kv_heads": 1},
    {"num_heads": 64, "num_kv_heads": 1},
    # Scalars that are 1 become constants of the kernel.
    {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "teacher_window": 1, "student_window": 1},
]


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        *((x._replace(dtype="float32"), gpu) for x in cases(decode) for gpu in (89, 120)),
        *((cases(decode)[-1]._replace(**changes), 90) for changes in UNUSUAL),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_decode_in_float32_and_of_unusual_shapes_fits_without_spills(case, capability):
    for kernel in compile_kernels(decode, case, capability):
        assert kernel.spill_bytes == 0
        assert kernel.shared_bytes <= SHARED_LIMIT[capability]
        if capability != 90:
            assert kernel.registers * 32 * kernel.num_warps <= REGISTERS


def test_machine_code_is_reported_by_case(monkeypatch, capsys):
    monkeypatch.setattr(decode.tuning, "HEAD_DIMS", (32,))
    machine_code.main(["--op", "decode", "--capability", "80"])
    header, _, kernel, merging = capsys.readouterr().out.splitlines()
    assert header.split()[:-5] == ["variant", *Counts._fields[:-1]]
    assert kernel.split()[:2] == ["D32", "decode_attention"]
    assert merging.split()[:2] == ["D32", "decode_merge"]
