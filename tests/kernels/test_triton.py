"""The Triton kernels of dual-window attention without a GPU: numerics by the interpreter, machine
code ahead of time."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from interpreting import check_errors
from launched import launched_kernels
from ttcd_kernels import dual_window_attention, launch
from ttcd_kernels.dual_window import bench
from ttcd_kernels.dual_window.tuning import PADDED, tuning_for
from ttcd_kernels.machine_code import REGISTERS, SHARED_LIMIT, compile_kernels

KERNELS = ["dual_window_forward", "dual_window_backward_q", "dual_window_backward_kv"]
BASE = {"T": 40, "S": 40, "N": 2, "K": 1, "H": 32, "teacher": 16, "student": 8}
CASES = [
    # windows
    BASE,
    BASE | {"teacher": 100, "student": 1},  # beyond the row; the query alone
    BASE | {"teacher": 13, "student": 13, "block_n": 32},  # no far band
    BASE | {"teacher": 21, "student": 20, "block_m": 32},
    BASE | {"scale": -0.3},
    # shapes
    BASE | {"B": 2, "T": 33, "S": 50, "N": 4, "K": 2, "teacher": 20, "student": 7},  # halo
    BASE | {"T": 5, "S": 5, "K": 2},  # less than a tile
    BASE | {"H": 64, "T": 1, "S": 37, "block_n": 32},  # the last query alone
    # columns padded to 128, with heads that follow one another in memory
    BASE | {"H": 80, "N": 4, "K": 2, "T": 33, "S": 50, "documents": 3},
    BASE | {"H": 96, "N": 2, "K": 2, "T": 24, "S": 24, "dtype": "bfloat16"},
    BASE | {"H": 80, "N": 3, "K": 1, "T": 37, "S": 37, "is_public": True},
    # documents
    BASE | {"documents": 4},
    BASE | {"B": 2, "S": 51, "documents": 9, "N": 4, "K": 2, "block_m": 32},
    BASE | {"documents": 3, "T": 130, "S": 170, "teacher": 90, "student": 40},
    BASE | {"B": 2, "documents": 2, "is_mixed": True, "teacher": 30},
    # transforms
    *[BASE | {"transform": name, "T": 24, "S": 24} for name in ("jit", "remat", "vmap")],
    # public
    BASE | {"is_public": True, "T": 150, "S": 150, "teacher": None, "student": 60},
    # narrow
    *[BASE | {"dtype": dtype} for dtype in ("bfloat16", "float16")],
]
# A relative step of each dtype; sums over up to 16 keys, probabilities rounded once.
BOUND = {"float32": 2e-6, "bfloat16": 3e-2, "float16": 3e-3}


def test_results_and_gradients_are_those_of_the_definition():
    check_errors("dual_window", CASES, BOUND, "teacher_lse", "student_lse")


CODE = [case for case in bench.SHAPES["aot"] if case.head_dim == 64 or not case.has_documents]


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        *itertools.product(CODE, (80, 89, 90, 120)),
        *((case, 100) for case in CODE if case.has_documents),  # each takes half a minute
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_machine_code_fits_and_spills_nothing_in_the_forward(case, capability):
    forward, backward_q, backward_kv = kernels = compile_kernels(bench, case, capability)
    assert [kernel.name for kernel in kernels] == KERNELS
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
    kernels = compile_kernels(bench, case, 90)
    for kernel, tile, products, bound in zip(
        kernels, tuning_for(90, head_dim, 2), (2, 3, 4), instructions, strict=True
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
        *((case, gpu) for case in CODE if case.head_dim not in PADDED for gpu in (80, 90)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_machine_code_of_float32_uses_tensor_cores_and_fits_every_gpu(case, capability):
    kernels = compile_kernels(bench, case._replace(dtype="float32"), capability)
    assert [kernel.name for kernel in kernels] == KERNELS
    for kernel in kernels:
        assert kernel.spill_bytes <= 2048
        assert kernel.shared_bytes <= min(SHARED_LIMIT.values())
        assert kernel.registers * 32 * kernel.num_warps <= REGISTERS
        assert kernel.tensor_core_instructions > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"BLOCK_X": 3}, "dual_window_forward: got an unexpected keyword argument 'BLOCK_X'"),
        ({"BLOCK_M": None}, "dual_window_forward: missing a required argument: 'BLOCK_M'"),
    ],
)
def test_a_launch_names_the_parameter_that_is_wrong(change, message, monkeypatch):
    real = launch.launch

    def changed(kernel, *args, **keywords):
        keywords = {name: value for name, value in (keywords | change).items() if value is not None}
        return real(kernel, *args, **keywords)

    monkeypatch.setattr(launch, "launch", changed)
    q = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)
    with pytest.raises(TypeError, match=message):
        launched_kernels(_attend_to_itself, q, capability=90)


def _attend_to_itself(q):
    return dual_window_attention(
        q, q, q, teacher_window=16, student_window=8, implementation="triton"
    )
