"""Reading in pieces and going on token by token give what one pass over the row gives."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, randomize, refused
from flax import nnx
from small_models import CHUNK, config_of

from ttcd_jax.errors import DataError
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import even_size, prefill, stream
from ttcd_jax.inference.state import start_state
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer

pytestmark = pytest.mark.usefixtures("float64")

ROWS, T, WINDOW = 3, 23, 6  # chunks and windows end at different tokens
TOKENS = np.random.default_rng(0).integers(0, 11, (ROWS, T))


def _config(method: str, **changes: Any) -> TransformerConfig:
    # Few layers: what is compiled decides how long the tests take.
    changes = {"num_layers": 2 if method == "ipttcd" else 1} | changes
    window = None if method == "full" else WINDOW
    return config_of(method, student_window=3, **changes).replace(window=window)


@functools.cache
def _models(config: TransformerConfig):
    """(the model, its logits [B, T, V] of the whole rows)."""
    model = randomize(Transformer, config)
    forward = nnx.jit(lambda model, tokens: model(tokens))
    return inference_model(model), np.asarray(forward(model, jnp.asarray(TOKENS)))


def _rest(done: np.ndarray) -> np.ndarray:
    """The rows from `done` on."""
    return np.stack([np.roll(row, -n) for row, n in zip(TOKENS, done, strict=True)])


def _behind(logits: np.ndarray, ends: np.ndarray) -> np.ndarray:
    return logits[np.arange(ROWS), np.minimum(ends, T) - 1]


# Every kind of state; test_any_split.py has all methods.
@pytest.mark.parametrize("method", ["full", "ipttcd", "lact", "deltanet_hybrid"])
def test_pieces_and_tokens_give_what_one_pass_gives(method):
    model, want = _models(_config(method))
    first, second = np.array([2 * CHUNK, 9, 3]), np.array([14, 8, CHUNK + 2])
    state = start_state(model, ROWS, max_length=T)
    logits, state = prefill(model, state, TOKENS, first, piece_size=2 * CHUNK)
    assert_close(np.asarray(logits), _behind(want, first))
    logits, state = prefill(model, state, _rest(first), second, piece_size=2 * CHUNK)
    assert_close(np.asarray(logits), _behind(want, first + second))
    # All of it again, token by token, the rows at different tokens of their chunks and windows.
    tokenwise = start_state(model, ROWS, max_length=T)
    before = decode._cache_size()
    for time in range(max(first + second) + ROWS):
        done = np.clip(time - np.arange(ROWS), 0, first + second)
        is_active = (time >= np.arange(ROWS)) & (done < first + second)
        tokens = TOKENS[np.arange(ROWS), np.minimum(done, T - 1)]
        logits, tokenwise = decode(model, tokenwise, tokens, is_active)
        assert_close(np.asarray(logits)[is_active], _behind(want, done + 1)[is_active])
    assert decode._cache_size() <= before + 1  # one program for all tokens
    assert state.position.tolist() == tokenwise.position.tolist()
    assert_close(state.layers, tokenwise.layers, 1e-10)  # running sums of numbers that grow


def test_every_split_around_the_edges_of_chunk_and_window():
    model, want = _models(_config("ipttcd"))
    for split in range(1, 2 * WINDOW + 2):
        lengths = np.array([split, split + 1, split + CHUNK])
        logits, state = prefill(model, start_state(model, ROWS), TOKENS, lengths, piece_size=3)
        assert_close(np.asarray(logits), _behind(want, lengths))
        for done in (lengths + step for step in range(CHUNK + 1)):
            is_active = done < T
            tokens = TOKENS[np.arange(ROWS), np.minimum(done, T - 1)]
            logits, state = decode(model, state, tokens, is_active)
            assert_close(np.asarray(logits)[is_active], _behind(want, done + 1)[is_active])


def test_a_row_that_waits_keeps_its_state():
    model, _ = _models(_config("ipttcd"))
    lengths = np.array([7, 5, 2])
    _, state = prefill(model, start_state(model, ROWS), TOKENS, lengths)
    kept = jax.tree.map(lambda x: np.asarray(x)[1], state)
    is_active = np.array([True, False, True])
    _, state = decode(model, state, TOKENS[:, 0], is_active)
    assert_same(jax.tree.map(lambda x: np.asarray(x)[1], state), kept)
    for _, _, later in stream(model, state, TOKENS, np.array([9, 0, 4])):
        state = later
    assert_same(jax.tree.map(lambda x: np.asarray(x)[1], state), kept)


@pytest.mark.parametrize("num_rows", [1, ROWS])
def test_a_token_copies_no_state_and_computes_no_write_of_a_chunk(num_rows):
    model, _ = _models(_config("ipttcd"))
    state = start_state(model, num_rows)
    tokens = jnp.asarray(TOKENS[:num_rows, 0])
    program = decode.lower(model, state, tokens).compile().as_text()
    entry = program[program.index("\nENTRY ") :]

    def made(by: str) -> set[tuple[int, ...]]:
        shapes = re.findall(rf"= f64\[([\d,]+)\]\S* (?:{by})\(", entry)
        return {tuple(map(int, shape.split(","))) for shape in shapes}

    assert not made("copy") & {x.shape for x in jax.tree.leaves(state.layers)}
    memory = state.layers[0]["mlp"].chunks.memory
    assert not made("dot|fusion") & {memory.shape, memory.shape[1:]}


def test_the_pieces_of_a_prompt_have_one_size_with_little_padding():
    config = _config("ipttcd")
    for longest in range(CHUNK + 1, 40 * CHUNK):
        size = even_size(config, longest, 11 * CHUNK)
        assert size in range(CHUNK, 11 * CHUNK + 1, CHUNK)
        num_pieces = -(-longest // size)
        assert num_pieces * size <= 1.25 * (longest + num_pieces * CHUNK)
    model, _ = _models(config)
    state = start_state(model, 1)
    sizes = [hidden.shape[1] for _, hidden, _ in stream(model, state, TOKENS[:1], piece_size=9)]
    assert sizes == [2 * CHUNK] * -(-T // (2 * CHUNK)), "the last one is padded to the others' size"


def test_bad_input_is_refused_before_anything_is_read():
    model, _ = _models(_config("ipttcd"))
    state, read = start_state(model, ROWS), functools.partial(prefill, model)
    refused("shape (2, 23)|3 rows", read, state, TOKENS[:2])
    refused("lengths |do not fit", read, state, TOKENS, np.array([1, 24, 2]))
    refused("row 1 has no token", read, state, TOKENS, np.array([1, 0, 2]))
    refused("token 11 at position 0", read, state, np.full((ROWS, 2), 11), error=DataError)
    refused("'all'|kept, published", read, state, TOKENS, memory="all")
    refused("piece_size 0|at least 1", read, state, TOKENS, piece_size=0)
    assert state.position.tolist() == [0] * ROWS  # not donated: still there
    memory = MemoryConfig(chunk_size=CHUNK, num_taps=3, is_conv_causal=False)
    ahead = inference_model(randomize(Transformer, _config("ipttcd", memory=memory)))
    refused("is_conv_causal=False|'teacher'", start_state, ahead, 1)


def test_full_attention_says_what_it_needs():
    model, _ = _models(_config("full"))
    refused("give max_length", start_state, model, ROWS)
    small, state = (start_state(model, ROWS, max_length=size) for size in (T - 1, 2))
    refused("23 tokens|holds 22|max_length=23", prefill, model, small, TOKENS)
    for tokens in TOKENS[:, :3].T:
        logits, state = decode(model, state, tokens, np.array([True, True, False]))
        is_number = np.isfinite(np.asarray(logits)).all(axis=1).tolist()
        assert is_number == [state.position[0] <= 2] * 2 + [True]
