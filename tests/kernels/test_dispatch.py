"""The choice of an implementation: the one a call names, or the best that can run here. Calls that
do not fit, and operands that no kernel can take, are refused before any launch by both numbers."""

import contextlib
import inspect
import logging
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from checks import refused
from ttcd_kernels import dispatch, launch, short_conv_residual
from ttcd_kernels.decode.api import decode_attention_with_lse
from ttcd_kernels.dispatch import Candidate, choose
from ttcd_kernels.dual_window import api
from ttcd_kernels.dual_window.api import dual_window_attention, dual_window_attention_with_lse
from ttcd_kernels.windows import Windows

from experiments.studies.kernels.machine_code import launches

OPERANDS = jnp.ones((3, 2))
CANDIDATES = {
    "best": Candidate(lambda: "best", lambda x: "an odd number of rows" if len(x) % 2 else None),
    "plain": Candidate(lambda: "plain"),
    "special": Candidate(lambda: "special"),
}


def test_auto_takes_the_first_that_can_and_says_once_what_it_passed_over(caplog):
    dispatch._log_once.cache_clear()
    caplog.set_level(logging.INFO, "ttcd_kernels.dispatch")
    assert choose("an op", "auto", CANDIDATES, OPERANDS)() == "plain"  # without a GPU it is quiet
    assert choose("an op", "auto", CANDIDATES, OPERANDS[:2])() == "best"
    assert caplog.records == []
    with launch.compiling_for(90):
        for _ in range(2):
            assert choose("an op", "auto", CANDIDATES, OPERANDS)() == "plain"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "an op does not run as 'best': an odd number of rows"


@pytest.mark.parametrize(
    ("gpu", "head_dim", "dtype", "scale", "name"),
    [
        (90, 64, "bfloat16", 0.1, "mosaic"),
        (90, 128, "float16", 0.1, "mosaic"),
        (90, 64, "bfloat16", -0.1, "triton"),
        (90, 64, "float32", 0.1, "triton"),
        (90, 80, "bfloat16", 0.1, "triton"),
        (90, 48, "bfloat16", 0.1, "xla"),
        (100, 64, "bfloat16", 0.1, "xla"),  # no such GPU has been checked
    ],
)
def test_auto_takes_the_fastest_kernel_that_was_checked(gpu, head_dim, dtype, scale, name, caplog):
    """One that is passed over for another is no news; where none is taken all are."""
    dispatch._log_once.cache_clear()
    x = jax.ShapeDtypeStruct((1, 8, 2, head_dim), dtype)
    operands = x, x, x, None, Windows(4, 2, scale)
    with launch.compiling_for(gpu):
        assert choose("attention", "auto", api.CANDIDATES, *operands) is api.CANDIDATES[name].run
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] * (2 if name == "xla" else 0)
    text = "not been checked on a GPU of compute capability 100: name them"
    assert (text in caplog.text) == (gpu == 100)


def test_a_named_implementation_never_falls_back():
    assert choose("an op", "special", CANDIDATES, OPERANDS)() == "special"
    for name, words in (
        ("best", "'best': an odd number of rows|use 'auto' or 'xla'"),
        ("fast", "'fast'|auto, best, plain, special"),
    ):
        refused(words, choose, "an op", name, CANDIDATES, OPERANDS, error=ValueError)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (SimpleNamespace(device_kind="MI300X", compute_capability="gfx942"), None),
        (SimpleNamespace(device_kind="H100", compute_capability="9.0"), 90),
        (SimpleNamespace(device_kind="RTX 5090", compute_capability="12.0"), 120),
        (SimpleNamespace(device_kind="TPU v5"), None),
    ],
    ids=lambda value: getattr(value, "device_kind", None),
)
def test_only_gpus_of_nvidia_have_a_capability(device, expected, monkeypatch):
    with jax.default_device("cpu"):
        assert launch.capability() is None
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    assert launch.capability() == expected
    assert launch.capability(jnp.ones(2)) is None  # this array is on a CPU
    assert jax.eval_shape(lambda x: jnp.float32(launch.capability(x) or 0) * x, jnp.ones(2))


def test_a_launch_names_the_parameter_that_is_wrong():
    windows = {"teacher_window": 16, "student_window": 8, "implementation": "triton"}
    attend = partial(dual_window_attention, **windows)
    (found,) = launches(attend, [jnp.ones((1, 64, 2, 32), jnp.bfloat16)] * 3, 90)
    for name, words in (("BLOCK_X", "unexpected|'BLOCK_X'"), ("BLOCK_M", "missing|'BLOCK_M'")):
        named = {x: y for x, y in found.kwargs.items() if x != name}
        named |= {} if name in found.kwargs else {name: 3}
        call = partial(launch.launch, *found.args, **named)
        refused(f"dual_window_forward: |{words}", call, error=TypeError)


def _zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def _three(names, q, k, dtype="float32"):
    """Queries of one shape, keys and values of another."""
    first, *others = names.split()
    return {first: _zeros(*q, dtype=dtype), **dict.fromkeys(others, _zeros(*k, dtype=dtype))}


_qkv, _rings = partial(_three, "q k v"), partial(_three, "q k_cache v_cache")


def _both(name, *arrays):
    return {f"teacher_{name}": arrays[0], f"student_{name}": arrays[-1]}


def _z(array):
    return {"z_teacher": array, "z_student": array}


Z, TAPS, POSITION = _zeros(1, 2, 8, 4, dtype="bfloat16"), _zeros(5, 4), _zeros(2, dtype="int32")
FUNCTIONS = {
    "dual": dual_window_attention_with_lse,
    "decode": decode_attention_with_lse,
    "conv": short_conv_residual,
}
ARGUMENTS = {
    "dual": _qkv((1, 4, 2, 4), (1, 4, 2, 4)) | _both("window", 4, 2),
    "decode": _rings((2, 4, 8), (2, 16, 2, 8)) | _both("window", 16, 8) | {"position": POSITION},
    "conv": _z(Z) | _both("taps", TAPS) | {"is_causal": True, "normalizes_keys": True},
}


def _refused(op, changes, words):
    """The call as users make it: the suite's type checker would refuse some before the library."""
    refused(words, inspect.unwrap(FUNCTIONS[op]), error=ValueError, **ARGUMENTS[op] | changes)


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
        ("dual", {"implementation": "fused"}, "'fused'|auto, mosaic, triton, xla"),
        ("decode", {"q": _zeros(2, 4, 4)}, "(2, 4, 4)|(2, 16, 2, 8)|head dimension"),
        ("decode", _rings((2, 4, 8), (3, 16, 2, 8)), "q has 2 rows and the cache 3"),
        ("decode", {"position": _zeros(3, dtype="int32")}, "shape (3,)|2 queries need (2,)"),
        ("decode", {"position": _zeros(2)}, "position is float32|int32"),
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
WIDE, HOPPERS = (_qkv(*[(1, 8, 1, 64)] * 2, dtype=x) for x in ("float32", "bfloat16"))
MOSAIC = {"implementation": "mosaic"}
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
        ("decode", 90, ((2, 4, 32), (2, 16, 2, 32), "float64"), "float64, float64, float64"),
        ("decode", None, _rings((2, 4, 32), (2, 16, 2, 32)), "no NVIDIA GPU|cpu"),
        ("conv", 90, _both("taps", _zeros(9, 4)), "9 taps are more than 8"),
        ("dual", 90, MOSAIC | NARROW, "head dim 32 is not one of 64, 128"),
        ("dual", 90, MOSAIC | WIDE, "float32, float32, float32: they must be"),
        ("dual", 100, MOSAIC | HOPPERS, "compute capability 100, not 90"),
        (
            "dual",
            90,
            MOSAIC | HOPPERS | {"scale": -0.1},
            "scale is -0.1, the kernel",
        ),
        ("dual", None, MOSAIC | HOPPERS, "no NVIDIA GPU"),
        ("conv", None, {}, "no NVIDIA GPU|cpu"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_before_launch(
    op, capability, changes, words, float64
):
    if capability is None and jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    changes = changes if isinstance(changes, dict) else _rings(*changes)  # made in float64
    with launch.compiling_for(capability) if capability else contextlib.nullcontext():
        _refused(op, {"implementation": "triton"} | changes, words)
