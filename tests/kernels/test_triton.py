"""The Triton kernels of dual-window attention without a GPU: numerics by the interpreter."""

import jax
import jax.numpy as jnp
import pytest
from interpreting import check_errors
from launched import launched_kernels
from ttcd_kernels import dual_window_attention, launch

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
