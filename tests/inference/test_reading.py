"""Rows read in pieces of any size and continued token by token give what one pass gives."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, distance, logits_of, randomize, refused
from devices import elsewhere
from flax import nnx
from jax.sharding import AxisType
from small_models import CHUNK, RECALL, config_of, model_of
from ttcd_kernels.measure import temp_bytes

from ttcd_jax import MemoryConfig, Precision, Transformer, TransformerConfig
from ttcd_jax.errors import DataError
from ttcd_jax.inference import inference_model, start_state
from ttcd_jax.inference.decode import decode, head_logits, head_weight
from ttcd_jax.inference.prefill import even_size, prefill, stream
from ttcd_jax.methods import METHODS
from ttcd_jax.nn.block import Views
from ttcd_jax.nn.row import Row
from ttcd_jax.sharding.mesh import AXES
from ttcd_jax.tasks.recall import read_back
from ttcd_jax.train.state import with_params

pytestmark = pytest.mark.usefixtures("float64")

ROWS, T, WINDOW = 3, 23, 6  # chunks and windows end at different tokens
TOKENS = np.random.default_rng(0).integers(0, 11, (ROWS, T))


def _config(method: str, **changes: Any) -> TransformerConfig:
    # Few layers: what is compiled decides how long the tests take.
    changes = {"num_layers": 2 if method == "ipttcd" else 1} | changes
    window = None if method == "full" else WINDOW
    return config_of(method, student_window=3, **changes).replace(window=window)


def _read(config: TransformerConfig, tokens: np.ndarray):
    """(the model, its logits [B, T, V] of the whole rows)."""
    model = randomize(Transformer, config)
    return inference_model(model), np.asarray(logits_of(model, tokens))


@functools.cache
def _models(method: str):
    return _read(_config(method), TOKENS)


def _behind(logits: np.ndarray, ends: np.ndarray) -> np.ndarray:
    return logits[np.arange(ROWS), np.minimum(ends, T) - 1]


def _decoded(model, state, done, is_active, want, **options):
    """The state after one token more of the active rows, whose logits are as they should be."""
    tokens = TOKENS[np.arange(ROWS), np.minimum(done, T - 1)]
    logits, state = decode(model, state, tokens, is_active, **options)
    assert_close(np.asarray(logits)[is_active], _behind(want, done + 1)[is_active])
    return state


def test_the_head_of_one_row_of_bfloat16_is_read_once():
    """XLA on a CPU would write it in float32 for every token."""
    config = _config("swa", vocab_size=512, dim=64, precision=Precision(compute="bfloat16"))
    model = inference_model(randomize(Transformer, config))
    rows = jax.random.normal(jax.random.key(0), (3, 64), jnp.bfloat16)
    one = jax.jit(head_logits).lower(model, rows[:1]).compile()
    assert temp_bytes(one) < head_weight(model).nbytes
    found = np.concatenate([one(model, row[None]) for row in rows])
    assert (found.shape, found.dtype) == ((3, 512), jnp.bfloat16)
    assert_close(found, head_logits(model, rows.astype(jnp.float32)), 2**-8)


def test_every_split_around_the_edges_of_chunk_and_window():
    model, want = _models("ipttcd")
    for split in range(1, 2 * WINDOW + 2):
        lengths = np.array([split, split + 1, split + CHUNK])
        logits, state = prefill(model, start_state(model, ROWS), TOKENS, lengths, piece_size=3)
        assert_close(np.asarray(logits), _behind(want, lengths))
        for done in (lengths + step for step in range(CHUNK + 1)):
            state = _decoded(model, state, done, done < T, want)


@pytest.mark.parametrize("num_rows", [1, ROWS])
def test_a_token_copies_no_state_and_computes_no_write_of_a_chunk(num_rows):
    model, _ = _models("ipttcd")
    state = start_state(model, num_rows)
    program = decode.lower(model, state, jnp.asarray(TOKENS[:num_rows, 0])).compile().as_text()
    entry = program[program.index("\nENTRY ") :]

    def made(by: str) -> set[tuple[int, ...]]:
        shapes = re.findall(rf"= f64\[([\d,]+)\]\S* (?:{by})\(", entry)
        return {tuple(map(int, shape.split(","))) for shape in shapes}

    assert not made("copy") & {x.shape for x in jax.tree.leaves(state.layers)}
    memory = state.layers[0]["mlp"].chunks.memory
    assert not made("dot|fusion") & {memory.shape, memory.shape[1:]}


def test_the_pieces_of_a_prompt_have_one_size_with_little_padding():
    for longest in range(CHUNK + 1, 40 * CHUNK):
        size = even_size(_config("ipttcd"), longest, 11 * CHUNK)
        assert size in range(CHUNK, 11 * CHUNK + 1, CHUNK)
        num_pieces = -(-longest // size)
        assert num_pieces * size <= 1.25 * (longest + num_pieces * CHUNK)
    model, _ = _models("ipttcd")
    pieces = stream(model, start_state(model, 1), TOKENS[:1], piece_size=9)
    sizes = [hidden.shape[1] for _, hidden, _ in pieces]
    assert sizes == [2 * CHUNK] * -(-T // (2 * CHUNK)), "the last one is padded to the others' size"


def test_bad_input_is_refused_before_anything_is_read():
    model, _ = _models("ipttcd")
    state, read = start_state(model, ROWS), functools.partial(prefill, model)
    refused("[2, 23]|[3, T]", read, state, TOKENS[:2])
    refused("lengths |do not fit", read, state, TOKENS, np.array([1, 24, 2]))
    refused("lengths [1, 0, 2]|from 1 to 23", read, state, TOKENS, np.array([1, 0, 2]))
    refused("token 11 at position 0", read, state, np.full((ROWS, 2), 11), error=DataError)
    refused("'all'|kept, published", read, state, TOKENS, memory="all")
    refused("piece_size 0|at least 1", read, state, TOKENS, piece_size=0)
    assert state.position.tolist() == [0] * ROWS  # not donated: still there
    plain, _ = _models("swa")
    published = {"memory": "published"}
    refused("'swa'|use 'kept'", prefill, plain, start_state(plain, ROWS), TOKENS, **published)
    memory = MemoryConfig(chunk_size=CHUNK, num_taps=3, is_conv_causal=False)
    ahead = inference_model(randomize(Transformer, _config("ipttcd", memory=memory)))
    refused("is_conv_causal=False|'teacher'", start_state, ahead, 1)
    mesh = jax.sharding.AbstractMesh((1, 1, 2, 1), AXES, (AxisType.Auto,) * 4)
    with jax.sharding.use_abstract_mesh(mesh):
        refused("seq 2 must be 1", start_state, plain, 2)


def test_full_attention_says_what_it_needs():
    model, _ = _models("full")
    refused("give max_length", start_state, model, ROWS)
    small, state = (start_state(model, ROWS, max_length=size) for size in (T - 1, 2))
    refused("23 tokens|holds 22|max_length=23", prefill, model, small, TOKENS)
    for tokens in TOKENS[:, :3].T:
        logits, state = decode(model, state, tokens, np.array([True, True, False]))
        is_number = np.isfinite(np.asarray(logits)).all(axis=1).tolist()
        assert is_number == [state.position[0] <= 2] * 2 + [True]


def _sizes(method: str, rng: np.random.Generator) -> TransformerConfig:
    """The small model with window, chunk and taps from 1 up, in any relation."""
    config = config_of(method, num_layers=1)
    chunk, taps, window = (int(rng.integers(1, most)) for most in (17, 7, 14))
    changes = {"chunk_size": chunk, "num_taps": taps}
    own = {name: value for name, value in changes.items() if hasattr(config.memory, name)}
    return config.replace(
        window=None if method == "full" else window,
        student_window=int(rng.integers(1, window + 1)),
        memory=None if config.memory is None else config.memory.replace(**own),
    )


SWITCHES = [
    {"renorm_chunks": 2, "orthogonalizes_updates": True},
    {"output": "teacher_raw", "is_conv_causal": False},
    {"has_teacher_conv": False, "has_student_conv": False, "has_token_rate": False},
    {"folds_state": True, "resets_at_document": False},
    {"output": "student", "normalizes_errors": True, "has_proj": False},
    {"half_lives": (5.0, 80.0), "decay": "gated"},
    {"corrects_errors": True, "half_lives": (9.0,)},
    {"error": "learned", "corrects_errors": True, "has_proj": False},
]


@pytest.mark.parametrize(
    ("method", "switches"),
    [*((method, {}) for method in METHODS), *(("ipttcd", switches) for switches in SWITCHES)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_any_way_to_read_rows_gives_what_one_pass_gives(method, switches):
    """Up to sums in another order; the state too, and one program serves all tokens."""
    rng = np.random.default_rng(list(METHODS).index(method))
    num_rows, length = (int(rng.integers(*bounds)) for bounds in ((2, 5), (30, 60)))
    rows, tokens = np.arange(num_rows), rng.integers(0, 11, (num_rows, length))
    config = _sizes(method, rng)
    if switches:
        memory = config.memory.replace(**{"form": "auto", "num_taps": 4} | switches)
        config = config.replace(memory=memory)
    model, want = _read(config, tokens)
    state, done = start_state(model, num_rows, max_length=length), np.zeros(num_rows, int)
    before = decode._cache_size()
    for _ in range(3):
        lengths = np.minimum(length - done, rng.integers(0, length // 2, num_rows))
        rest = np.stack([np.roll(row, -n) for row, n in zip(tokens, done, strict=True)])
        piece_size = int(rng.integers(1, 40))
        for counts, hidden, after in stream(model, state, rest, lengths, piece_size=piece_size):
            state, logits = after, np.asarray(head_logits(model, hidden))
            for row, (start, count) in enumerate(zip(done, counts, strict=True)):
                assert_close(logits[row, :count], want[row, start : start + count], 1e-10)
            done = done + counts
        for _ in range(int(rng.integers(1, 8))):
            is_active = (done < length) & (rng.random(num_rows) < 0.8)
            now = rows, np.minimum(done, length - 1)
            logits, state = decode(model, state, tokens[now], is_active)
            assert_close(np.asarray(logits)[is_active], want[now][is_active], 1e-10)
            done = done + is_active
    assert decode._cache_size() <= before + 1
    assert state.position.tolist() == done.tolist()
    at_once = start_state(model, num_rows, max_length=length)
    _, at_once = prefill(model, at_once, tokens, done)
    assert_close(state.layers, at_once.layers, 1e-10)  # running sums of numbers that grow


LENGTHS = np.array([2 * CHUNK + 1, CHUNK, CHUNK - 1])
IS_LONG = LENGTHS >= CHUNK


@pytest.fixture(scope="module", params=["ipttcd", "ipttt"])
def one_layer(request):
    # One layer, so that what its MLP does to a token reaches no other token's input.
    with jax.enable_x64(True):
        return model_of(request.param, num_layers=1)


def _published(model, start: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] by definition: a prompt's tokens `start` .. `ends` are read through a memory
    that begins with them, all other tokens through the plain MLP."""

    @nnx.jit
    def logits(one_layer):
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


def test_prompts_read_their_memory_and_decoding_is_plain(one_layer):
    model, want = inference_model(one_layer), _published(one_layer, np.zeros(ROWS, int), LENGTHS)
    logits, state = prefill(model, start_state(model, ROWS), TOKENS, LENGTHS, memory="published")
    assert_close(np.asarray(logits), _behind(want, LENGTHS))
    for step in range(2):
        state = _decoded(model, state, LENGTHS + step, LENGTHS > 0, want, memory="published")
    # A second prompt finds the memory empty and counts its own chunks.
    start = LENGTHS + 2
    ends = start + np.array([CHUNK + 1, CHUNK, 2])
    rest = np.stack([np.roll(row, -n) for row, n in zip(TOKENS, start, strict=True)])
    again, _ = prefill(model, state, rest, ends - start, memory="published")
    assert_close(np.asarray(again), _behind(_published(one_layer, start, ends), ends))
    kept, _ = prefill(model, start_state(model, ROWS), TOKENS, LENGTHS)
    assert_close(np.asarray(kept)[IS_LONG], np.asarray(logits)[IS_LONG])
    # Of IP-TTCD the plain MLP skips a convolution as well.
    is_equal = np.allclose(np.asarray(kept)[~IS_LONG], np.asarray(logits)[~IS_LONG])
    assert is_equal == (one_layer.config.method == "ipttt")


def test_needles_are_read_back_as_one_pass_answers_them():
    # The third pair stays in the open chunk of the prompt: decoding has to write it.
    rows = RECALL.needles(seed=1, num_rows=8, num_needles=3, num_tokens=8)
    model = model_of("ipttcd", num_layers=1)
    read = [np.repeat(x[:, None], 3, axis=1) for x in (rows.facts, rows.haystack)]
    whole = np.concatenate([*read, rows.questions], axis=2)
    logits = jax.jit(lambda x: model(x)[:, -1])(jnp.asarray(whole.reshape(24, -1)))
    rows = rows._replace(values=np.asarray(logits.argmax(-1)).reshape(8, 3))
    model = inference_model(model)
    for by in ("decode", "prefill"):
        near, far = read_back(model, rows, [8, 4], "kept", by)
        assert (far.distance, far.queries, far.accuracy) == ("8", 24, 1.0)
        assert (near.distance, near.accuracy < 1) == ("4", True)
    (published,) = read_back(model, rows, [8], "published", "decode")
    assert published.accuracy < 1


PROMPTS, MORE = np.array([3, 9, 11, 8, 5, 12, 4, 7]), CHUNK + 1


def read_on_mesh(method: str, mesh_name: str):
    """(logits of the prompts and of every step after them, the state)."""
    from tests.sharding.equal_on_devices import B, V, config, mesh_of, placed_params

    model_config, mesh = config(method, num_layers=2, fast_layers=(0,)), mesh_of(mesh_name)
    tokens = np.random.default_rng(0).integers(0, V, (B, PROMPTS.max() + MORE))
    params = placed_params(model_config, mesh)
    with jax.set_mesh(mesh):
        model = inference_model(with_params(model_config, params))
        state = start_state(model, B, max_length=tokens.shape[1])
        logits, state = prefill(model, state, tokens, PROMPTS)
        found = [logits]
        for time in range(MORE):
            logits, state = decode(model, state, tokens[np.arange(B), PROMPTS + time])
            found.append(logits)
    return found, state


def on_a_mesh() -> dict[str, tuple[float, float]]:
    """By method the largest relative difference of logits and states on 2 x 2 x 1 x 2 devices (data
    x fsdp x seq x tensor) and on one, and the share of the state that one device holds."""
    results = {}
    for method in ("ipttcd", "deltanet_hybrid", "ipttcd_stream"):
        expected, found = read_on_mesh(method, "1x1x1x1"), read_on_mesh(method, "2x2x1x2")
        leaves = jax.tree.leaves(found[1])
        held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        worst = max(map(distance, jax.tree.leaves(found), jax.tree.leaves(expected)))
        results[method] = worst, held / sum(x.nbytes for x in leaves)
    return results


def test_a_mesh_changes_neither_logits_nor_states():
    found = elsewhere(on_a_mesh, is_wide=True)
    assert max(worst for worst, _ in found.values()) < 1e-10
    # Rows on four groups of devices, key heads and delta_w (0.79 of it) on two of each group.
    assert found["ipttcd"][1] < 0.16
