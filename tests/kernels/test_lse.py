"""Dual-window attention out of single-window calls, with any stock attention, cuDNN's among them;
`test_dual_window.py` compares its results and gradients with the definition's."""

import re

import definitions
import jax
import jax.numpy as jnp
import numpy as np
from checks import draw
from jax._src.cudnn import fused_attention_stablehlo
from ttcd_kernels import dual_window_attention_with_lse, launch
from ttcd_kernels.dual_window import lse
from ttcd_kernels.windows import Windows


def test_any_attention_that_returns_its_log_sum_exp_will_do():
    """Called twice: with the student's window, and with what the teacher's has beyond it. Nothing
    of it is differentiated."""
    calls = []

    def stock(q, k, v, window, scale):
        calls.append((q.shape[1], k.shape[1], window))
        out, stock_lse = definitions.single_window(q, k, v, None, window, scale)
        return jax.lax.stop_gradient(out), jax.lax.stop_gradient(stock_lse)

    q, k, v = draw(0, (2, 24, 2, 16), *[(2, 30, 1, 16)] * 2)

    def loss(attend, *qkv):
        return jnp.sin(attend(*qkv, None, Windows(12, 5, 0.25))[0]).sum()

    found = jax.grad(lambda *qkv: loss(lambda *a: lse.dual_window(*a, stock), *qkv), (0, 1, 2))
    assert calls == []
    gradients = found(q, k, v)
    assert calls == [(24, 30, 5), (24, 25, 7)]
    expected = jax.grad(lambda *qkv: loss(definitions.dual_window, *qkv), (0, 1, 2))(q, k, v)
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
