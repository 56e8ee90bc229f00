"""The choice of an implementation: the one a call names, or the best that can run here."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launched import launched_kernels
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


def test_without_a_gpu_auto_is_quiet(caplog):
    dispatch._log_once.cache_clear()
    caplog.set_level(logging.INFO, "ttcd_kernels.dispatch")
    choose("an op", "auto", CANDIDATES, OPERANDS)
    assert caplog.records == []


def test_a_named_implementation_never_falls_back():
    assert choose("an op", "special", CANDIDATES, OPERANDS)() == "special"
    with pytest.raises(ValueError, match="'best': an odd number of rows; use 'auto' or 'xla'"):
        choose("an op", "best", CANDIDATES, OPERANDS)
    with pytest.raises(ValueError, match="'fast' is not one of auto, best, special, plain"):
        choose("an op", "fast", CANDIDATES, OPERANDS)


def _operands(head_dim=64):
    q = jax.ShapeDtypeStruct((1, 256, 4, head_dim), jnp.bfloat16)
    return q, jax.ShapeDtypeStruct((1, 256, 2, head_dim), jnp.bfloat16)


def _gradient(transform=lambda f: f):
    def attend(q, k):
        return dual_window_attention(q, k, k, teacher_window=64, student_window=32)

    def loss(q, k):
        teacher, student = transform(attend)(q, k)
        return jnp.sin((teacher - student).astype(jnp.float32)).sum()

    return jax.grad(loss, (0, 1))


@pytest.mark.parametrize("capability", [80, 90])
def test_auto_is_the_kernel_where_there_is_a_gpu_and_runs_each_once(capability):
    q, k = _operands()
    assert launched_kernels(_gradient(), q, k, capability=capability) == KERNELS


def test_remat_runs_the_forward_again_and_nothing_else():
    q, k = _operands()
    launched = launched_kernels(_gradient(jax.checkpoint), q, k, capability=90)
    assert sorted(launched) == sorted([KERNELS[0], *KERNELS])


def test_auto_is_xla_for_what_the_kernel_cannot_take():
    q, k = _operands(head_dim=48)
    assert launched_kernels(_gradient(), q, k, capability=90) == []
    if jax.default_backend() == "cpu":
        q, k = (jnp.ones(x.shape, x.dtype) for x in _operands())
        assert all(np.isfinite(x).all() for x in _gradient()(q, k))
