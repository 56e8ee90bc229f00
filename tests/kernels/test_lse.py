"""Attention out of two stock calls where the stock is cuDNN's: which calls are made, on a described
GPU; what cannot be its. Results and gradients out of two calls of XLA: `test_dual_window.py`."""

import re
from functools import partial

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import draw
from jax._src.cudnn import fused_attention_stablehlo
from ttcd_kernels import dual_window_attention_with_lse, launch
from ttcd_kernels.dual_window import lse
from ttcd_kernels.windows import Windows

ATTEND = partial(
    dual_window_attention_with_lse, teacher_window=64, student_window=24, implementation="lse"
)


@pytest.fixture
def cudnn(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def _operands(T=96, S=128, H=64, dtype="bfloat16"):
    return draw(0, (2, T, 4, H), *[(2, S, 2, H)] * 2, dtype=dtype)


def test_on_a_hopper_gpu_both_calls_are_cudnns(cudnn):
    with launch.compiling_for(90):
        text = jax.jit(ATTEND).trace(*_operands()).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\S+?)\(", text) == ["__cudnn$fmhaSoftmax"] * 2
    assert re.findall(r"sliding_window_length\\22: (\d+)", text) == ["24", "40"]


def test_its_queries_are_counted_from_the_first_key_and_its_scale_is_positive(cudnn, monkeypatch):
    def stock(q, k, v, *, scale, mask_type, return_residual, sliding_window_length=None):
        assert (mask_type.name, return_residual, scale > 0) == ("CAUSAL", True, True)
        assert q.shape[1] == k.shape[1]
        wide = (x.astype("float32") for x in (q, k, v))
        window = sliding_window_length or k.shape[1]
        out, sums = definitions.single_window(*wide, None, window, scale)
        return out.astype(q.dtype), sums.swapaxes(1, 2)

    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", stock)
    operands = _operands()
    wide = [x.astype("float32") for x in operands]
    for teacher, student in ((64, 24), (None, 40)):
        windows = {"teacher_window": teacher, "student_window": student, "scale": -0.3}
        with launch.compiling_for(90):
            found = jax.jit(partial(ATTEND, **windows))(*operands)
        known = Windows(teacher or 128, student, -0.3)
        expected = jax.jit(partial(definitions.dual_window, segment_ids=None, windows=known))(*wide)
        for x, y, bound in zip(found, expected, (2**-7, 2**-7, 1e-5, 1e-5), strict=True):
            np.testing.assert_allclose(np.asarray(x, "float32"), y, atol=bound, rtol=bound)


def test_what_cudnn_cannot_take_is_xlas(cudnn, monkeypatch):
    ids = jnp.zeros((2, 128), "int32")
    refusals = (
        (None, _operands(), None, "no NVIDIA GPU"),
        (75, _operands(), None, "no NVIDIA GPU of compute capability 8.0"),
        (90, _operands(), ids, "no segment_ids"),
        (90, _operands(dtype="float32"), None, "float32"),
        (80, _operands(H=136), None, "head dim 136 is not a multiple of 8 up to 128"),
        (90, _operands(H=60), None, "head dim 60"),
    )
    for gpu, operands, documents, words in refusals:
        if gpu is None:
            assert jax.default_backend() == "gpu" or words in str(lse.no_cudnn(*operands, None))
            continue
        with launch.compiling_for(gpu):
            assert words in str(lse.no_cudnn(*operands, documents))
    monkeypatch.undo()
    with launch.compiling_for(90):
        assert jax.default_backend() == "gpu" or "JAX has none" in str(
            lse.no_cudnn(*_operands(), None)
        )
