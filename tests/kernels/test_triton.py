"""The Triton kernels without a GPU: numerics by the interpreter, machine code ahead of time, and
refusals."""

import jax
import jax.numpy as jnp
import pytest
from interpreting import check_errors
from launched import launched_kernels
from ttcd_kernels import dual_window_attention, launch
from ttcd_kernels.dual_window.bench import compile_gradient
from ttcd_kernels.dual_window.tuning import HEAD_DIMS, TABLE, tuning_for

BASE = {"T": 40, "S": 40, "N": 2, "K": 1, "H": 32, "teacher": 16, "student": 8}
CASES = [
    # windows
    BASE,
    BASE | {"teacher": 100, "student": 1},  # beyond the row; the query alone
    BASE | {"teacher": 13, "student": 13, "block_n": 32},  # no far band
    BASE | {"teacher": 21, "student": 20, "block_m": 32},
    # shapes
    BASE | {"B": 2, "T": 33, "S": 50, "N": 4, "K": 2, "teacher": 20, "student": 7},  # halo
    BASE | {"T": 5, "S": 5, "K": 2},  # less than a tile
    BASE | {"H": 64, "T": 1, "S": 37, "block_n": 32},  # the last query alone
    # documents
    BASE | {"documents": 4},
    BASE | {"B": 2, "S": 51, "documents": 9, "N": 4, "K": 2, "block_m": 32},
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


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code_spills_nothing_in_the_forward(capability, head_dim):
    kernels, launched = compile_gradient(capability, head_dim)
    assert launched == ["dual_window_forward", "dual_window_backward_q", "dual_window_backward_kv"]
    forward, backward_q, backward_kv = kernels
    assert [kernel.name for kernel in kernels] == launched
    assert forward.spill_bytes == 0
    assert max(backward_q.spill_bytes, backward_kv.spill_bytes) <= 64
    shared_limit = {80: 163 * 1024, 90: 227 * 1024}[capability]
    for kernel in kernels:
        assert kernel.shared_bytes <= shared_limit
        assert kernel.tensor_core_instructions > 0


@pytest.mark.parametrize("capability", [80, 90])
def test_documents_compile_too(capability):
    (forward, *backward), _ = compile_gradient(capability, 64, has_segments=True)
    assert forward.spill_bytes == 0
    assert max(kernel.spill_bytes for kernel in backward) <= 64


def test_the_table_knows_every_head_dim_and_older_and_newer_gpus():
    assert {dim for _, dim in TABLE} == set(HEAD_DIMS)
    for dim in HEAD_DIMS:
        assert tuning_for(86, dim) == TABLE[80, dim]
        assert tuning_for(100, dim) == TABLE[90, dim]


def _attend(dtype=jnp.bfloat16, key_dtype=jnp.bfloat16, head_dim=32, implementation="triton"):
    q, k = jnp.zeros((1, 8, 1, head_dim), dtype), jnp.zeros((1, 8, 1, head_dim), key_dtype)
    return dual_window_attention(
        q, k, k, teacher_window=4, student_window=2, implementation=implementation
    )


def test_what_the_kernel_cannot_take_is_refused_before_launch():
    with launch.compiling_for(90):
        with pytest.raises(ValueError, match=r"head dim 48 is not one of 32, 64, 128"):
            _attend(head_dim=48)
        with pytest.raises(ValueError, match="bfloat16, float16, float16: they must be of one"):
            _attend(key_dtype=jnp.float16)
    with launch.compiling_for(75), pytest.raises(ValueError, match="75, less than 80"):
        _attend()
    if jax.default_backend() != "gpu":
        with pytest.raises(ValueError, match=r"no GPU: the backend is cpu; use 'auto' or 'xla'"):
            _attend()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"BLOCK_X": 3}, "dual_window_forward has no parameter BLOCK_X: q_ptr, "),
        ({"BLOCK_M": None}, "takes 16 arguments and results besides H, .*, not 15: q_ptr, "),
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
