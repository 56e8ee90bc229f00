"""Decoding as the published code does: the memory is read in prompts of a chunk or more, and off
else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, randomize, refused
from flax import nnx
from small_models import CHUNK, config_of

from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import prefill
from ttcd_jax.inference.state import start_state
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.block import Views
from ttcd_jax.nn.row import Row

pytestmark = pytest.mark.usefixtures("float64")

T = 16
TOKENS = np.random.default_rng(0).integers(0, 11, (3, T))
LENGTHS = np.array([2 * CHUNK + 1, CHUNK, CHUNK - 1])
IS_LONG = LENGTHS >= CHUNK


@pytest.fixture(scope="module", params=["ipttcd", "ipttt"])
def model(request):
    # One layer, so that what its MLP does to a token reaches no other token's input.
    with jax.enable_x64(True):
        return randomize(Transformer, config_of(request.param, num_layers=1))


def _published(model, start: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] by definition: a prompt's tokens `start` .. `ends` are read through a memory
    that begins with them, all other tokens through the plain MLP."""

    @nnx.jit
    def logits(model):
        graph, params = nnx.split(model.group_0.block_0)
        block = nnx.merge(graph, jax.tree.map(lambda x: x[0], params))
        embeddings = h = model.embedding[...][jnp.asarray(TOKENS)]
        row = Row.of(h, embeddings=embeddings)
        x, student = block.inputs("mlp", h, row)
        t = block.mlp.source(x, row, student)
        mixed = block.mixer(block._normed("mixer", h, None)[0])
        h = h + (mixed.teacher if isinstance(mixed, Views) else mixed)
        y = block.mlp.plain(x)
        for row in np.flatnonzero(ends - start >= CHUNK):
            prompt = np.s_[row : row + 1, start[row] : ends[row]]
            y = y.at[prompt].set(block.mlp(x[prompt], t[prompt]))
        return model.logits(model.normed(h + y))

    return np.asarray(logits(model))


def _decoded(model, state, done, want):
    for step in range(2):
        logits, state = decode(model, state, TOKENS[np.arange(3), done + step], memory="published")
        assert_close(np.asarray(logits), want[np.arange(3), done + step])
    return state


def test_prompts_read_their_memory_and_decoding_is_plain(model):
    want = _published(model, np.zeros(3, int), LENGTHS)
    ours = inference_model(model)
    logits, state = prefill(ours, start_state(ours, 3), TOKENS, LENGTHS, memory="published")
    assert_close(np.asarray(logits), want[np.arange(3), LENGTHS - 1])
    state = _decoded(ours, state, LENGTHS, want)
    kept, _ = prefill(ours, start_state(ours, 3), TOKENS, LENGTHS)
    assert_close(np.asarray(kept)[IS_LONG], np.asarray(logits)[IS_LONG])
    # Of IP-TTCD the plain MLP skips a convolution as well.
    is_equal = np.allclose(np.asarray(kept)[~IS_LONG], np.asarray(logits)[~IS_LONG])
    assert is_equal == (model.config.method == "ipttt")


def test_a_second_prompt_finds_the_memory_empty_and_counts_its_own_chunks(model):
    start = LENGTHS + 2
    ends = start + np.array([CHUNK + 1, CHUNK, 2])
    want = _published(model, start, ends)
    ours = inference_model(model)
    _, state = prefill(ours, start_state(ours, 3), TOKENS, LENGTHS, memory="published")
    _, state = prefill(
        ours, state, TOKENS[np.arange(3)[:, None], LENGTHS[:, None] + [0, 1]], memory="published"
    )
    rest = np.stack([np.roll(row, -n) for row, n in zip(TOKENS, start, strict=True)])
    logits, _ = prefill(ours, state, rest, ends - start, memory="published")
    assert_close(np.asarray(logits), want[np.arange(3), ends - 1])


def test_a_model_without_such_a_memory_is_refused():
    model = inference_model(randomize(Transformer, config_of("swa", num_layers=1)))
    words, state = "method 'swa' has none: use 'kept'", start_state(model, 3)
    refused(words, prefill, model, state, TOKENS, memory="published")
