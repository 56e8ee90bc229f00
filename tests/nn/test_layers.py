"""Layers without a memory. What they compute is compared with the reference (tests/parity), other
scalings of positions with transformers (tests/interop); their reach is in tests/models."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw, randomize, refused
from small_models import WINDOW, config_of, small_attention
from ttcd_kernels.measure import temp_bytes

from ttcd_jax import Block, Piece, RopeConfig
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.models.config import block_configs
from ttcd_jax.nn.attention import Attention
from ttcd_jax.nn.linear import rms_norm, weight_product
from ttcd_jax.nn.rope import YarnConfig, pair_frequencies, rotate

T, D = 10, 6


@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (lambda x, weight: rms_norm(x, weight, 1e-6), [(8, 512), (512,)]),
        # Angles of a million tokens are float32.
        (lambda x: rotate(x, jnp.array([[999_983]]), RopeConfig()), [(1, 1, 1, 8)]),
    ],
    ids=["rms_norm", "rotate"],
)
def test_bfloat16_rounds_results_alone(run, shapes):
    inputs = draw(0, *shapes, dtype=jnp.bfloat16)
    narrow = run(*inputs)
    assert narrow.dtype == jnp.bfloat16
    assert_close(narrow, run(*(x.astype(jnp.float32) for x in inputs)), 2**-8)


@pytest.mark.parametrize(
    ("head_dim", "base", "factor", "original"), [(64, 1e4, 4.0, 2048), (128, 1e6, 8.0, 32768)]
)
def test_yarn_follows_its_formula(head_dim, base, factor, original):
    """A ramp between pairs, rounded outward to whole ones as in Hugging Face; the small heads whose
    logits are compared with transformers have none."""
    pair, cycle = np.arange(head_dim // 2), original / (2 * math.pi)
    fast, slow = (head_dim * math.log(cycle / turns, base) / 2 for turns in (32, 1))
    share = np.interp(pair, [math.floor(fast), math.ceil(slow)], [0, 1])
    yarn = YarnConfig(factor=factor, original_length=original)
    frequency, magnitude = pair_frequencies(RopeConfig(base=base, yarn=yarn), head_dim)
    expected = base ** (-2 * pair / head_dim) * (1 - share + share / factor)
    np.testing.assert_allclose(frequency, expected, rtol=1e-6)
    assert magnitude == pytest.approx(0.1 * math.log(factor) + 1)


def test_one_row_of_bfloat16_reads_a_kernel_once():
    """XLA's own product of one row writes the kernel in float32 at every token."""
    x, kernel = draw(0, (1, 1, 256), (256, 192), dtype=jnp.bfloat16)
    compiled = jax.jit(weight_product).lower(x, kernel).compile()
    assert temp_bytes(compiled) < kernel.nbytes
    y = compiled(x, kernel)
    assert (y.shape, y.dtype) == ((1, 1, 192), jnp.bfloat16)
    assert_close(y, weight_product(*(a.astype(jnp.float32) for a in (x, kernel))), 2**-8)


def test_full_attention_is_nan_at_tokens_that_its_state_cannot_hold():
    """Of rows that have such tokens alone."""
    attention = randomize(Attention, small_attention(window=None))
    (h,), state, found = draw(0, (2, 6, 6)), attention.start(2, 5), []
    for start in (0, 2, 4):
        x = h[:, start : start + 2]
        piece = Piece.of(x, start, lengths=jnp.array([2, 1]))
        y, state = attention.extend(x, piece, state)
        found.append(y)
    is_nan = np.isnan(np.concatenate(found, 1)).any(-1)
    assert is_nan.tolist() == [[False] * 5 + [True], [False] * 6]


def test_embeddings_that_do_not_fit_the_rows_are_refused():
    memory = TargetMemoryConfig(target="embedding", chunk_size=4)
    block = randomize(Block, block_configs(config_of("ipttt", memory=memory))[0])
    (h,) = draw(0, (2, 8, 8))
    whole, state, pieces = block(h, embeddings=h), block.start(2, None), []
    for start in map(np.int64, (0, 4)):
        own = h[:, start : start + 4]
        piece = Piece.of(own, start, chunk_size=4, window=WINDOW, embeddings=own)
        y, state = block.extend(own, piece, state)
        pieces.append(y)
    assert_close(np.concatenate(pieces, 1), whole)
    for embeddings, words in ((None, "pass embeddings"), (h[:, :4], "[2, 4, 8]"), (h[:1], "[1, 8")):
        refused(words, block, h, embeddings=embeddings)
