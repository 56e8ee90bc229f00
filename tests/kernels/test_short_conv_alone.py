"""One convolution inside chunks, as the layers without a residual use it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, draw
from ttcd_kernels.short_conv.xla import short_conv

B, C, F = 2, 3, 6


def _depthwise(x, taps, is_causal):
    """XLA's own convolution, chunk by chunk. It does not flip the kernel either."""
    R, length = taps.shape[0], x.shape[2]
    front = R - 1 if is_causal else R // 2
    out = jax.lax.conv_general_dilated(
        x.reshape(-1, length, F),
        taps[:, None, :],
        window_strides=(1,),
        padding=[(front, R - 1 - front)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=F,
    )
    return out.reshape(x.shape)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize(("num_taps", "length"), [(5, 8), (4, 8), (1, 3), (5, 3)])
def test_equals_a_depthwise_convolution_of_every_chunk(is_causal, num_taps, length, float64):
    x, taps, cotangent = draw(0, (B, C, length, F), (num_taps, F), (B, C, length, F))

    @jax.jit
    def both(x, taps):
        results = []
        for run in (
            partial(short_conv, is_causal=is_causal),
            partial(_depthwise, is_causal=is_causal),
        ):
            value, pull = jax.vjp(run, x, taps)
            results.append((value, pull(cotangent)))
        return results

    assert_close(*both(x, taps))


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "symmetric"])
def test_documents_of_a_chunk_equal_chunks_of_their_own(is_causal, float64):
    x, taps = draw(0, (1, 1, 9, F), (5, F))
    ids = jnp.asarray(np.repeat([[[3, 1, 2]]], [4, 1, 4], axis=-1))
    conv = jax.jit(partial(short_conv, is_causal=is_causal))
    alone = [conv(x[:, :, part], taps) for part in (slice(0, 4), slice(4, 5), slice(5, 9))]
    assert_close(conv(x, taps, segment_ids=ids), jnp.concatenate(alone, axis=2))


def test_one_document_needs_no_segments(float64):
    x, taps = draw(0, (1, 2, 7, F), (5, F))
    conv = partial(short_conv, is_causal=True)
    assert_same(conv(x, taps, segment_ids=jnp.ones((1, 2, 7), int)), conv(x, taps))


def test_identity_taps_pass_everything_through():
    (x,) = draw(0, (1, 2, 7, F))
    last, middle = jnp.zeros((2, 5, F)).at[0, 4].set(1).at[1, 2].set(1)
    assert_same(short_conv(x, last, is_causal=True), x)
    assert_same(short_conv(x, middle, is_causal=False), x)


def test_bfloat16_is_summed_in_float32():
    x, taps = draw(0, (1, 2, 32, F), (5, F), dtype=jnp.bfloat16)
    narrow = short_conv(x, taps, is_causal=True)
    assert narrow.dtype == jnp.bfloat16
    wide = short_conv(x.astype(jnp.float32), taps.astype(jnp.float32), is_causal=True)
    assert_close(narrow, wide, 2**-8)
