"""Decode attention: the XLA form against the definition, launches and slices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, draw
from devices import launched_kernels
from ttcd_kernels import launch
from ttcd_kernels.decode import triton_call
from ttcd_kernels.decode.api import decode_attention, decode_attention_with_lse
from ttcd_kernels.decode.tuning import TABLE, Slices, Tile, slices_for
from ttcd_kernels.windows import Windows

from experiments.studies.kernels import definition

# A row that waits, the beginning, both windows' ends, the ring's edge, far beyond.
PHASES = [-1, 0, 5, 19, 20, 47, 48, 52, 53, 54, 110, 2_000_000_011]
# A relative step of each dtype.
BOUND = {"float32": 2e-6, "bfloat16": 2e-2}
KERNELS = ["decode_attention", "decode_merge"]


def test_a_token_is_two_launches_and_no_operation_of_xla():
    """The launches' names, and the equations of their program."""
    windows = Windows(200, 100, 0.125)
    cache = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    q, position = jax.ShapeDtypeStruct((2, 4, 64), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    operands = q, cache, cache, position
    attend = partial(triton_call.decode, windows=windows)
    assert launched_kernels(attend, *operands, capability=90) == KERNELS
    with launch.compiling_for(90):
        launches = partial(triton_call._launch, windows, TABLE[90, 64])
        program = jax.make_jaxpr(launches)(*operands)
    assert [x.primitive.name for x in program.eqns] == ["triton_kernel_call"] * 2


def test_slices_fill_the_gpu_and_no_more():
    tile = Tile(64, 4, 3, num_programs=264)
    assert slices_for(tile, 8, 8192, 4096) == Slices(256, 16, 16)
    assert slices_for(tile, 8, 8192, 7936) == Slices(256, 31, 1)
    assert slices_for(tile, 512, 8192, 4096) == Slices(4096, 1, 1)
    assert slices_for(tile, 1, 2048, 2048) == Slices(64, 32, 0)
    assert slices_for(tile, 1, 3, 1) == Slices(64, 1, 1)


_xla = partial(decode_attention_with_lse, implementation="xla")


def _rings(positions, N, K, W, dtype=None):
    """q, k_cache, v_cache, position of heads of 8."""
    B = len(positions)
    arrays = draw(0, (B, N, 8), (B, W, K, 8), (B, W, K, 8), dtype=dtype)
    return *arrays, jnp.asarray(positions, jnp.int32)


@pytest.mark.parametrize(("teacher", "student"), [(48, 20), (53, 53), (2, 1), (1, 1)])
@pytest.mark.parametrize(("N", "K"), [(2, 2), (6, 2), (17, 1)])
def test_xla_computes_the_definition(teacher, student, N, K, float64):
    operands = _rings(PHASES, N, K, 53)
    scale = 0.7 if K == 2 else 300.0  # scores whose exponentials overflow
    ours = _xla(*operands, teacher_window=teacher, student_window=student, scale=scale)
    arrays = map(np.asarray, operands)
    theirs = definition.decode(*arrays, Windows(teacher, student, scale))
    waiting = tuple(x[:1] for x in ours)
    assert_same(waiting, tuple(x[:1] for x in theirs))
    assert not np.any(waiting[0])
    assert np.all(np.isneginf(waiting[2]))
    assert_close(tuple(x[1:] for x in ours), tuple(x[1:] for x in theirs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_results_are_near_those_of_float64(dtype):
    operands = _rings([3, 70], 4, 2, 24, dtype)
    windows = {"teacher_window": 24, "student_window": 9}
    with jax.enable_x64(True):
        wide = (jnp.asarray(x, jnp.float64) for x in operands[:3])
        expected = _xla(*wide, operands[3], **windows)
    found = _xla(*operands, **windows)
    assert [x.dtype.name for x in found] == [dtype, dtype, "float32", "float32"]
    assert_close(found[:2], expected[:2], BOUND[dtype])
    assert_close(found[2:], expected[2:], BOUND["float32"])


@pytest.mark.parametrize("form", ["triton", "xla"])
def test_a_gradient_is_refused(form):
    q, cache = jnp.ones((2, 2, 32), "float32"), jnp.ones((2, 8, 2, 32), "float32")
    position = jnp.asarray([3, 4], jnp.int32)

    def loss(q):
        options = {"teacher_window": 8, "student_window": 4, "implementation": form}
        return sum(x.sum() for x in decode_attention(q, cache, cache, position, **options))

    with launch.compiling_for(90), pytest.raises(ValueError, match="is not differentiable"):
        jax.jit(jax.grad(loss))(q)
