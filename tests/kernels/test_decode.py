"""Decode attention: launches, slices, no gradient. Its results: `test_xla.py`."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from devices import launched_kernels
from ttcd_kernels import launch
from ttcd_kernels.decode import triton_call
from ttcd_kernels.decode.api import decode_attention
from ttcd_kernels.decode.tuning import TABLE, Slices, Tile, slices_for
from ttcd_kernels.windows import Windows

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


@pytest.mark.parametrize("form", ["triton", "xla"])
def test_a_gradient_is_refused(form):
    q, cache = jnp.ones((2, 2, 32), "float32"), jnp.ones((2, 8, 2, 32), "float32")
    position = jnp.asarray([3, 4], jnp.int32)

    def loss(q):
        options = {"teacher_window": 8, "student_window": 4, "implementation": form}
        return sum(x.sum() for x in decode_attention(q, cache, cache, position, **options))

    with launch.compiling_for(90), pytest.raises(ValueError, match="is not differentiable"):
        jax.jit(jax.grad(loss))(q)
