"""Calls that do not fit, and operands that a kernel cannot take: refused before any launch, by both
numbers."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import pytest
from checks import refused
from ttcd_kernels import (
    decode_attention_with_lse,
    dual_window_attention_with_lse,
    launch,
    short_conv_residual,
)


def _zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def _qkv(q, k, dtype="float32"):
    return {"q": _zeros(*q, dtype=dtype), **dict.fromkeys("kv", _zeros(*k, dtype=dtype))}


def _rings(q, k, dtype="float32"):
    cache = _zeros(*k, dtype=dtype)
    return {"q": _zeros(*q, dtype=dtype), "k_cache": cache, "v_cache": cache}


def _both(name, *arrays):
    return {f"teacher_{name}": arrays[0], f"student_{name}": arrays[-1]}


def _z(array):
    return {"z_teacher": array, "z_student": array}


Z, TAPS = _zeros(1, 2, 8, 4, dtype="bfloat16"), _zeros(5, 4)
CALLS = {
    "dual": (
        dual_window_attention_with_lse,
        _qkv((1, 4, 2, 4), (1, 4, 2, 4)) | _both("window", 4, 2),
    ),
    "decode": (
        decode_attention_with_lse,
        _rings((2, 4, 8), (2, 16, 2, 8))
        | _both("window", 16, 8)
        | {"position": _zeros(2, dtype="int32")},
    ),
    "conv": (
        short_conv_residual,
        _z(Z) | {"is_causal": True, "normalizes_keys": True} | _both("taps", TAPS),
    ),
}


def _refused(op, changes, words):
    """The call as users make it: the suite's type checker would refuse some before the library."""
    function, arguments = CALLS[op]
    refused(words, inspect.unwrap(function), error=ValueError, **arguments | changes)


@pytest.mark.parametrize(
    ("op", "changes", "words"),
    [
        ("dual", _both("window", 2, 3), "student_window 3|teacher_window 2"),
        ("dual", {"student_window": 0}, "student_window|0|at least 1"),
        ("dual", {"teacher_window": -1}, "teacher_window|-1"),
        ("dual", {"q": _zeros(1, 4, 3, 4)}, "2 kv heads|3 query heads"),
        ("dual", {"q": _zeros(1, 6, 2, 4)}, "6 queries|4"),
        ("dual", {"v": _zeros(1, 4, 2, 5)}, "(1, 4, 2, 4)|(1, 4, 2, 5)"),
        ("dual", {"q": _zeros(2, 4, 2, 4)}, "(2, 4, 2, 4)|(1, 4, 2, 4)"),
        ("dual", {"segment_ids": _zeros(1, 3, dtype="int32")}, "(1, 3)|(1, 4)"),
        ("dual", {"segment_ids": _zeros(1, 4)}, "segment_ids float32|int"),
        ("dual", {"student_window": None}, "student_window None|teacher_window 4"),
        ("dual", {"teacher_window": 4.5}, "teacher_window is 4.5|integer"),
        ("dual", {"scale": float("nan")}, "scale nan is not finite"),
        ("dual", {"q": _zeros(4, 2, 4)}, "q is (4, 2, 4)|[B T N H]"),
        ("dual", {"q": [[1.0]]}, "q is list|[B T N H]"),
        ("dual", {"q": _zeros(1, 4, 2, 4, dtype="bfloat16")}, "bfloat16, float32, float32"),
        ("dual", _qkv((1, 4, 2, 4), (1, 4, 2, 4), "int32"), "int32, int32, int32|floating"),
        ("dual", _qkv((1, 4, 2, 0), (1, 4, 2, 0)), "head dimension"),
        ("dual", _qkv((1, 4, 2, 4), (1, 4, 0, 4)), "0 kv heads"),
        ("decode", {"q": _zeros(2, 4, 8, dtype="bfloat16")}, "bfloat16, float32, float32"),
        ("dual", {"implementation": "fused"}, "'fused'|auto, triton, xla, mosaic"),
        ("decode", {"v_cache": _zeros(2, 16, 1, 8)}, "k_cache|(2, 16, 2, 8)|(2, 16, 1, 8)"),
        ("decode", {"q": _zeros(2, 4, 4)}, "(2, 4, 4)|(2, 16, 2, 8)|head dimension"),
        ("decode", {"q": _zeros(2, 3, 8)}, "2 kv heads do not divide 3 query heads"),
        ("decode", _rings((2, 4, 8), (3, 16, 2, 8)), "q has 2 rows and the cache 3"),
        ("decode", {"position": _zeros(3, dtype="int32")}, "shape (3,)|2 queries need (2,)"),
        ("decode", {"position": _zeros(dtype="int32")}, "shape ()|2 queries need (2,)"),
        ("decode", {"position": _zeros(2)}, "position is float32|int32"),
        ("decode", {"student_window": 0}, "student_window is 0|at least 1"),
        ("decode", {"student_window": 17}, "student_window 17|teacher_window 16"),
        ("decode", {"teacher_window": 20}, "16 slots|20 positions"),
        ("decode", {"implementation": "cudnn"}, "'cudnn'|auto, triton, xla"),
        ("conv", {"z_student": _zeros(1, 2, 9, 4)}, "(1, 2, 8, 4) and z_student (1, 2, 9, 4)"),
        ("conv", {"student_taps": _zeros(4, 4)}, "(5, 4) and student_taps (4, 4)|pad the shorter"),
        ("conv", _z(_zeros(1, 2, 8, 4, dtype="int32")), "z is int32"),
        ("conv", _both("taps", _zeros(5, 3)), "(5, 3) and z (1, 2, 8, 4) differ"),
        ("conv", {"segment_ids": _zeros(1, 2, 9, dtype="int32")}, "(1, 2, 9)|(1, 2, 8)"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_both_numbers(op, changes, words):
    _refused(op, changes, words)


NARROW = _qkv((1, 8, 1, 32), (1, 8, 1, 32), "bfloat16")
MIXED = _qkv((1, 8, 1, 32), (1, 8, 1, 32), "float16") | {"q": NARROW["q"]}
HEAD_DIMS = "is not one of 32, 64, 80, 96, 128"


@pytest.mark.parametrize(
    ("op", "capability", "changes", "words"),
    [
        ("dual", 90, _qkv((1, 8, 1, 48), (1, 8, 1, 48)), f"head dim 48 {HEAD_DIMS}"),
        ("dual", 90, MIXED, "bfloat16, float16, float16|of one"),
        ("dual", 75, NARROW, "75, less than 80"),
        ("dual", None, NARROW, "no NVIDIA GPU|cpu|use 'auto' or 'xla'"),
        ("decode", 90, {}, f"head dim 8 {HEAD_DIMS}"),
        ("decode", 90, _rings((2, 65, 32), (2, 16, 1, 32)), "65 query heads|64"),
        ("decode", None, _rings((2, 4, 32), (2, 16, 2, 32)), "no NVIDIA GPU|cpu"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_before_launch(op, capability, changes, words):
    if capability is None and jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with launch.compiling_for(capability) if capability else contextlib.nullcontext():
        _refused(op, changes | {"implementation": "triton"}, words)


def test_float64_is_no_kernels():
    with launch.compiling_for(90), jax.enable_x64(True):
        wide = _rings((2, 4, 32), (2, 16, 2, 32), "float64")
        _refused("decode", wide | {"implementation": "triton"}, "float64, float64, float64")
