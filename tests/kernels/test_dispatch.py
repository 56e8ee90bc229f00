"""The choice of an implementation: the one a call names, or the best that can run here."""

import logging
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, draw, refused
from devices import launched_kernels
from ttcd_kernels import dispatch, dual_window_attention, launch
from ttcd_kernels.dispatch import Candidate, choose

KERNELS = ["dual_window_forward", "dual_window_backward_q", "dual_window_backward_kv"]
OPERANDS = jnp.ones((3, 2))


def _refuses(x):
    return "an odd number of rows" if x.shape[0] % 2 else None


CANDIDATES = {
    "best": Candidate(lambda: "best", _refuses),
    "special": Candidate(lambda: "special", is_automatic=False),
    "plain": Candidate(lambda: "plain"),
}


def test_auto_takes_the_first_that_can_and_says_once_what_it_passed_over(caplog):
    dispatch._log_once.cache_clear()
    caplog.set_level(logging.DEBUG, "ttcd_kernels.dispatch")
    assert choose("an op", "auto", CANDIDATES, OPERANDS[:2])() == "best"
    assert caplog.records == []
    with launch.compiling_for(90):
        for _ in range(2):
            assert choose("an op", "auto", CANDIDATES, OPERANDS)() == "plain"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "an op does not run as 'best': an odd number of rows"
    dispatch._log_once.cache_clear()
    caplog.clear()
    caplog.set_level(logging.INFO, "ttcd_kernels.dispatch")
    choose("an op", "auto", CANDIDATES, OPERANDS)  # without a GPU it is quiet
    assert caplog.records == []


def test_a_named_implementation_never_falls_back():
    assert choose("an op", "special", CANDIDATES, OPERANDS)() == "special"
    for name, words in (
        ("best", "'best': an odd number of rows|use 'auto' or 'xla'"),
        ("fast", "'fast'|auto, best, special, plain"),
    ):
        refused(words, choose, "an op", name, CANDIDATES, OPERANDS, error=ValueError)


def _operands(head_dim=64):
    q = jax.ShapeDtypeStruct((1, 256, 4, head_dim), jnp.bfloat16)
    return q, jax.ShapeDtypeStruct((1, 256, 2, head_dim), jnp.bfloat16)


def _gradient():
    def loss(q, k):
        teacher, student = dual_window_attention(q, k, k, teacher_window=64, student_window=32)
        return jnp.sin((teacher - student).astype(jnp.float32)).sum()

    return jax.grad(loss, (0, 1))


@pytest.mark.parametrize("capability", [80, 90])
def test_auto_is_the_kernel_where_there_is_a_gpu_and_runs_each_once(capability):
    q, k = _operands()
    assert launched_kernels(_gradient(), q, k, capability=capability) == KERNELS


def test_auto_is_xla_for_what_the_kernel_cannot_take():
    q, k = _operands(head_dim=48)
    assert launched_kernels(_gradient(), q, k, capability=90) == []
    if jax.default_backend() == "cpu":
        q, k = (jnp.ones(x.shape, x.dtype) for x in _operands())
        assert all(np.isfinite(x).all() for x in _gradient()(q, k))


OF_AMD = SimpleNamespace(device_kind="MI300X", compute_capability="gfx942")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (OF_AMD, None),
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


def test_a_gpu_without_triton_runs_xla(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: [OF_AMD])
    q, k = draw(0, (1, 20, 2, 32), (1, 20, 1, 32))
    windows = {"teacher_window": 9, "student_window": 4}
    found = jax.jit(partial(dual_window_attention, **windows))(q, k, k)
    assert_same(found, dual_window_attention(q, k, k, implementation="xla", **windows))
