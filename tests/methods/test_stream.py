"""A memory of the whole stream: its definition, what leaves it empty, pieces, and the student alone
with a frozen one."""

import functools

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, distance, randomize, refused
from flax import nnx
from small_models import CHUNK, config_of, model_of, rows_of

from ttcd_jax import Precision, Transformer, TransformerConfig
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import CheckpointError
from ttcd_jax.inference import Generation, Request, decode, inference_model, prefill
from ttcd_jax.inference.saved_state import load_state, save_state
from ttcd_jax.inference.state import frozen, start_state
from ttcd_jax.measure.task import Subject
from ttcd_jax.methods.ipttcd_stream import StreamMemoryConfig
from ttcd_jax.models.config import block_configs
from ttcd_jax.tasks import gap
from ttcd_jax.train import layers_on_disk as disk

IDS = np.repeat([5, 2, 9], [9, 1, 13]).astype(np.int32)
T = len(IDS)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, T))


def _config(**changes) -> TransformerConfig:
    """Two layers under the memory's, one above it."""
    settings = {x: changes.pop(x) for x in {*changes} & {*StreamMemoryConfig.__dataclass_fields__}}
    memory = StreamMemoryConfig(**{"chunk_size": CHUNK} | settings)
    fields = {"num_layers": 4, "fast_layers": (2,), "window": 9, "student_window": 3}
    return config_of("ipttcd_stream", memory=memory, **fields | changes)


def _of_rows(config, rows):
    """The model of those parameters that it has; others are zero."""
    shapes = disk.stored_params(config)
    rows = {x: rows.get(x, np.zeros(y.shape, y.dtype)) for x, y in shapes.items()}
    return disk.model_of(config, rows)


def _remembered(settings, z, d, beta, ids, until):
    """What every token reads; the first `until` tokens write, one by one."""
    memory, read = jnp.zeros((z.shape[1], d.shape[1])), []
    for t in range(len(z)):
        is_new = t == 0 or (ids[t] != ids[t - 1] and settings.resets_at_document)
        memory = jnp.zeros_like(memory) if is_new else memory
        k = z[t] / jnp.linalg.norm(z[t])
        read.append(k @ memory)
        if t < until:
            memory = memory + jnp.outer(k, beta[t] * (d[t] - k @ memory))
    return jnp.stack(read)


def _defined(config, rows, tokens, ids, until=T):
    """Of a row (the student's stream after the final norm, d and what the last memory returns)."""
    teacher = student = rows["embedding"][tokens]
    settings, found = config.settings, None
    for layer in range(config.num_layers):
        run = functools.partial(definitions.layer, config, rows, layer, config.sink_tokens, ids)
        student, x, z, y = run(config.student_window, student)
        if layer <= max(config.fast_layers):
            teacher, theirs, _, target = run(config.window, teacher)
        if layer in config.fast_layers:
            stops = jax.lax.stop_gradient if settings.stops_teacher else lambda x: x
            d = stops(target) - y if settings.target == "layer" else stops(teacher) - student
            seen = stops(theirs) if settings.rate_source == "teacher" else x
            odds = settings.initial_rate / (1 - settings.initial_rate)
            gate = seen @ rows[f"layers/{layer}/mlp/rate"]
            beta = 1 / (1 + jnp.exp(-gate) / odds)
            found = d, _remembered(settings, z, d, beta, ids, until)
            student = student + settings.eta * found[1]
    return definitions.norm(student, rows["final_norm"]), found


VARIANTS = {
    "stream": {},
    "the layer's error, the student's rate": {
        **{"target": "layer", "rate_source": "student", "resets_at_document": False},
        **{"fast_layers": (0,), "num_layers": 1},
    },
    "a full teacher without gradient, sinks": {
        **{"window": None, "sink_tokens": 2, "stops_teacher": True, "initial_rate": 0.7},
        **{"fast_layers": (1,), "num_layers": 2},
    },
    "two memories": {"fast_layers": (1, 0), "num_layers": 2, "eta": 0.5},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_is_its_definition_with_every_gradient(name, float64):
    model = randomize(Transformer, config := _config(**VARIANTS[name]), std=0.3)
    rows, (graph, params) = rows_of(model), nnx.split(model)
    tokens, ids = TOKENS[0], jnp.asarray(IDS[None])
    weight = np.random.default_rng(1).standard_normal((T, config.dim))

    @jax.jit
    def ours(params):
        def loss(params):
            hidden = nnx.merge(graph, params).forward(jnp.asarray(tokens[None]), ids)[0][0]
            return (hidden * weight).sum(), hidden

        gradient, hidden = jax.grad(loss, has_aux=True)(params)
        return hidden, disk.unstacked(config, disk.by_name(nnx.to_pure_dict(gradient)))

    @jax.jit
    def theirs(rows):
        def loss(rows):
            hidden, _ = _defined(config, rows, tokens, IDS)
            return (hidden * weight).sum(), hidden

        gradient, hidden = jax.grad(loss, has_aux=True)(rows)
        return hidden, gradient

    (hidden, found), (wanted, expected) = ours(params), theirs(rows)
    assert_close(hidden, wanted, 1e-11)
    assert_close({x: found[x] for x in sorted(found)}, dict(sorted(expected.items())), 1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_gap_or_a_read_the_model_is_the_windowed_one_to_the_bit(dtype):
    config = _config(
        precision=Precision(compute=dtype), sink_tokens=1, num_layers=3, fast_layers=(1,)
    )
    config = config.replace(scans_layers=False)  # a loop is compiled on its own
    rows = rows_of(randomize(Transformer, config))
    changes = {"method": "swa", "window": 3, "fast_layers": (), "memory": None}
    run = nnx.jit(lambda model: model.forward(jnp.asarray(TOKENS), jnp.asarray([IDS] * 2)))
    plain, _ = run(_of_rows(config.replace(**changes), rows))
    silent = config.replace(memory=config.memory.replace(eta=0.0))
    alone = config.memory.frozen(config)
    for other, share, words in (
        *((config.replace(window=3), 0, ", no gap"), (silent, 1, ", eta = 0")),
        (alone, None, ", frozen"),
    ):
        hidden, stats = run(_of_rows(other, rows))
        assert_same(hidden, plain)
        assert not stats.memory_ratio[0], "nothing is written, or nothing read"
        assert (stats.window_share, other.label) == (share, f"IP-TTCD of the stream{words}")
    assert distance(run(_of_rows(config, rows))[0], plain) > 0.01


@pytest.mark.parametrize(("window", "split", "size"), [(9, 7, 3), (None, 10, 8)])
def test_pieces_and_single_tokens_are_one_pass_and_the_student_goes_on_alone(
    window, split, size, float64, tmp_path
):
    """With what the memory holds, whatever was read before; on disk too."""
    config = _config(window=window, student_window=3, sink_tokens=2)
    rows, start = rows_of(whole := randomize(Transformer, config)), 18
    model, want = inference_model(whole), nnx.jit(lambda x: x(jnp.asarray(TOKENS)))(whole)
    state = start_state(model, 2, max_length=T)
    logits, state = prefill(model, state, TOKENS[:, :split], piece_size=size)
    assert_close(logits, want[:, split - 1])
    _, state = prefill(model, state, TOKENS[:, split : split + 6], piece_size=size)
    for t in range(split + 6, T):
        if t == start:
            read = jax.tree.map(jnp.copy, state)
        logits, state = decode(model, state, TOKENS[:, t])
        assert_close(logits, want[:, t])
    args = np.zeros(T, np.int32), start
    defined = jax.jit(lambda tokens: _defined(config, rows, tokens, *args)[0])
    want = np.stack([defined(tokens) for tokens in TOKENS]) @ np.asarray(model.head[...]).T
    alone, state = frozen(model, read)
    assert max(x.shape[1] for x in jax.tree.leaves(state.layers[0])) == 3, "the student's ring"
    logits, state = prefill(alone, state, TOKENS[:, start : start + 3])
    assert_close(np.asarray(logits), want[:, start + 2])
    save_state(tmp_path / "state", alone, state)
    refused("another configuration", load_state, tmp_path / "state", model, error=CheckpointError)
    state = load_state(tmp_path / "state", alone)
    for t in range(start + 3, T):
        logits, state = decode(alone, state, TOKENS[:, t])
        assert_close(np.asarray(logits), want[:, t])


def test_generation_freezes_the_memory_after_the_prompt(float64):
    config = _config(vocab_size=ByteTokenizer.vocab_size, num_layers=1, fast_layers=(0,))
    model, prompt = inference_model(randomize(Transformer, config)), np.arange(14)
    requests = [Request(tokens=prompt, max_new_tokens=7, begins_with_bos=False)]
    begin = functools.partial(Generation, tokenizer=ByteTokenizer(), requests=requests)
    generation = begin(model, memory="frozen")
    texts, found = [x.token for x in generation], []
    logits, state = prefill(model, start_state(model, 1), prompt[None])
    alone, state = frozen(model, state)
    for _ in range(7):
        found.append(int(logits[0].argmax()))
        logits, state = decode(alone, state, np.array(found[-1:]))
    assert texts == found
    assert generation.model.config == alone.config
    plain = inference_model(model_of("swa", vocab_size=config.vocab_size))
    refused("'swa'|no memory in a down projection", begin, plain, memory="frozen")


def test_distances_are_those_of_the_streams(float64):
    model = randomize(Transformer, config := _config(), std=0.3)
    found = nnx.jit(
        lambda model: model.distillation(jnp.asarray(TOKENS[:1]), jnp.asarray(IDS[None]))
    )(model)
    d, read = _defined(config, rows_of(model), TOKENS[0], IDS)[1]
    assert found.off.shape == (1, 1, T)
    assert_close(np.asarray(found.off[0, 0]), jnp.linalg.norm(d, axis=-1), 1e-9)
    assert_close(np.asarray(found.on[0, 0]), jnp.linalg.norm(d - read, axis=-1), 1e-9)
    assert_close(np.asarray(found.change[0, 0]), jnp.linalg.norm(read, axis=-1), 1e-9)


def test_it_starts_as_the_task_stream_measures_without_training(float64):
    """The base model with one new parameter, the gate's, is the trial of `tasks.gap`."""
    full = config_of("full", num_layers=4)
    model, length = randomize(Transformer, full), 150
    documents = [np.random.default_rng(n).integers(0, 11, length) for n in range(2)]
    task = gap.Stream(window=3, sinks=2, layer=2, length=length)
    subject = Subject(model, ByteTokenizer(), {}, "")
    records = [*task.measure(task.scorer(subject, "", model), documents, subject)]
    shares = [x.share for x in records if x.memory == gap.STREAM]
    memory = StreamMemoryConfig(chunk_size=gap.CHUNK, initial_rate=task.rate)
    changes = {"method": "ipttcd_stream", "student_window": 3, "sink_tokens": 2}
    config = full.replace(**changes, fast_layers=(2,), memory=memory)
    assert disk.stored_params(config).keys() - disk.stored_params(full).keys() == {
        "layers/2/mlp/rate"
    }
    silent, rows = config.replace(memory=memory.replace(eta=0.0)), rows_of(model)

    def losses(config):
        scores = task.scorer(subject, "", _of_rows(config, rows)).losses(documents)
        return np.array([x.losses[length // 3 :].mean() for x in scores])

    above, between, below = map(losses, (silent, config, full))
    np.testing.assert_allclose((above - between) / (above - below), shares, rtol=1e-6)


def test_a_memory_of_the_stream_is_not_called_alone():
    layer = block_configs(config_of("ipttcd_stream"))[0].mlp.build(rngs=nnx.Rngs(0))
    refused("call the Block", layer, jnp.ones((1, 4, 8)), jnp.ones((1, 4, 8)))
