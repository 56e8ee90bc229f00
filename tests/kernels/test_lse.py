"""Dual-window attention out of single-window calls: the definition's values and gradients, with any
stock attention, cuDNN's among them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from ttcd_kernels import dual_window_attention_with_lse, launch
from ttcd_kernels.dual_window import lse, reference
from ttcd_kernels.windows import Windows

SCALE = 0.25
# T, S, N, K, teacher window, student window
CASES = {
    "grouped": (40, 40, 4, 2, 16, 8),
    "halo": (33, 50, 4, 2, 20, 7),
    "beyond the row": (5, 5, 2, 2, 100, 1),
    "every query has a far band": (12, 40, 2, 1, 39, 3),
    "few queries have": (12, 40, 2, 1, 40, 30),
    "one window": (20, 20, 2, 1, 9, 9),
    "no room for a far band": (6, 6, 2, 1, 9, 6),
    "the last query alone": (1, 30, 2, 2, 20, 10),
}


def _operands(T, S, N, K, dtype, H=16):
    keys = jax.random.split(jax.random.key(T), 7)
    shapes = [(2, T, N, H), (2, S, K, H), (2, S, K, H), *[(2, T, N, H)] * 2, *[(2, T, N)] * 2]
    return [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_definition(name, float64):
    T, S, N, K, *lengths = CASES[name]
    windows = Windows(*lengths, SCALE)
    q, k, v, *cotangents = _operands(T, S, N, K, jnp.float64)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(form, *qkv):
        results, pull = jax.vjp(lambda *qkv: form(*qkv, None, windows), *qkv)
        return *results, *pull(tuple(cotangents))

    pairs = zip(
        gradient(lse.dual_window, q, k, v), gradient(reference.dual_window, q, k, v), strict=True
    )
    for x, y in pairs:
        np.testing.assert_allclose(x, y, atol=1e-13)


def test_any_attention_that_returns_its_log_sum_exp_will_do():
    """Called twice: with the student's window, and with what the teacher's has beyond it. Nothing
    of it is differentiated."""
    calls = []

    def stock(q, k, v, window, scale):
        calls.append((q.shape[1], k.shape[1], window))
        out, stock_lse = reference.single_window(q, k, v, None, window, scale)
        return jax.lax.stop_gradient(out), jax.lax.stop_gradient(stock_lse)

    q, k, v, *_ = _operands(24, 30, 2, 1, jnp.float32)

    def loss(attend, *qkv):
        return jnp.sin(attend(*qkv, None, Windows(12, 5, SCALE))[0]).sum()

    found = jax.grad(lambda *qkv: loss(lambda *a: lse.dual_window(*a, stock), *qkv), (0, 1, 2))
    assert calls == []
    gradients = found(q, k, v)
    assert calls == [(24, 30, 5), (24, 25, 7)]
    expected = jax.grad(lambda *qkv: loss(reference.dual_window, *qkv), (0, 1, 2))(q, k, v)
    for x, y in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


def test_parts_without_keys_add_nothing_to_a_merge():
    outs = jnp.array([[[1.0, 2.0]], [[7.0, 7.0]], [[3.0, 4.0]]])
    lses = jnp.array([[0.5], [-jnp.inf], [0.5]])
    out, total = lse.merge(outs, lses)
    np.testing.assert_allclose(out, [[2.0, 3.0]], atol=1e-6)
    np.testing.assert_allclose(total, [0.5 + np.log(2)], atol=1e-6)
    out, total = lse.merge(outs, jnp.full((3, 1), -jnp.inf))
    assert (np.asarray(out) == 0).all()
    assert np.isneginf(total).all()


def test_documents_are_refused():
    q, k, v, *_ = _operands(8, 8, 1, 1, jnp.float32)
    with pytest.raises(ValueError, match=r"'lse': documents .* are not supported; use 'auto'"):
        dual_window_attention_with_lse(
            q,
            k,
            v,
            teacher_window=4,
            student_window=2,
            segment_ids=jnp.zeros((2, 8), jnp.int32),
            implementation="lse",
        )


def test_on_a_hopper_gpu_both_calls_are_cudnns_and_the_gradients_ours(monkeypatch):
    """Lowered without a GPU; with halo, which cuDNN gets as rows before the queries."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    q = jax.ShapeDtypeStruct((1, 96, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def attend(q, k, v):
        return dual_window_attention_with_lse(
            q, k, v, teacher_window=64, student_window=24, implementation="lse"
        )

    with launch.compiling_for(90):
        traced = jax.jit(attend).trace(q, k, k)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\S+?)\(", text) == ["__cudnn$fmhaSoftmax"] * 2
    lengths = re.findall(r"sliding_window_length\\22: (\d+)", text)
    assert lengths == ["24", "40"]
    assert [x.shape for x in jax.tree.leaves(traced.out_info)] == [
        *[(1, 96, 4, 64)] * 2,
        *[(1, 96, 4)] * 2,
    ]
