"""Memories of texts: sums that are exact and sums that are not, a fresh state with a memory, plain
models that have one in their weights, files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, distance, draw, randomize, refused
from damage import flip
from flax import nnx
from small_models import CHUNK, FLOAT64, config_of, model_of

from ttcd_jax import IPTTCDMLP, IPTTCDConfig, MemoryConfig, MLPConfig, Piece, Precision, Transformer
from ttcd_jax.errors import CheckpointError
from ttcd_jax.inference import (
    TextMemory,
    dense,
    inference_model,
    load_memory,
    mean,
    memories_of,
    read_memory,
    start_from,
)
from ttcd_jax.inference.prefill import prefill, stream
from ttcd_jax.inference.saved_state import load_state, model_facts, save_state
from ttcd_jax.inference.state import frozen, start_state
from ttcd_jax.memory.prefix import PrefixOptions, Writes
from ttcd_jax.memory.running import CorrectingMemory
from ttcd_jax.methods.ip_ttt import IPTTTMLP, IPTTTConfig, TargetMemoryConfig
from ttcd_jax.train.layers_on_disk import by_name

MLP = MLPConfig(dim=6, hidden_dim=8, precision=FLOAT64)


def layer(cls, config, memory):
    """A layer of four tokens a chunk; convolutions of three taps."""
    memory = memory.replace(chunk_size=CHUNK, num_taps=3)
    return randomize(cls, config(mlp=MLP, memory=memory), std=0.7)


def memory_after(**settings):
    """The function from texts [B, T, D], T even, to S [B, F, D] after them, one after the other,
    whose tokens see no others; `times`: multiplies S after the first of them."""
    mlp = layer(IPTTCDMLP, IPTTCDConfig, MemoryConfig(**settings))
    extend, written = jax.jit(lambda *x: mlp.extend(*x)[1]), jax.jit(mlp.written)

    def after(*texts, times=1):
        state, start = mlp.start(len(texts[0])), 0
        for text in texts:
            for part in jnp.split(text, text.shape[1] // 2, axis=1):
                piece = Piece.of(part, start, chunk_size=CHUNK, window=1)
                state = extend(part, piece, state, part[..., ::-1])
                start += 2
            if text is texts[0] and len(texts) == 2:
                doubled = jax.tree.map(lambda x: times * x, state.chunks.memory)
                chunks = type(state.chunks)(doubled, state.chunks.open)
                state = state._replace(chunks=chunks)
        return np.asarray(written(state, jnp.full(len(texts[0]), start)))

    return after


def test_what_is_exact_of_a_sum_and_what_is_not(float64):
    a, b, c = draw(0, (1, 8, 6), (1, 8, 6), (1, 6, 6))
    pair, turned = jnp.concatenate([a, b]), jnp.concatenate([b, a])
    after = memory_after()
    parts = after(pair)
    both = after(pair, turned)
    assert_close(both, np.stack([parts.sum(0)] * 2))
    odd = after(c), after(c, b)
    assert distance(odd[1], odd[0] + parts[1:]) > 0.01, "convolutions"
    plain = memory_after(has_teacher_conv=False, has_student_conv=False)
    assert_close(plain(c, b), plain(c) + plain(b))
    lives = np.array([5.0, 80.0])
    after = memory_after(half_lives=tuple(lives.tolist()), has_student_conv=False)
    assert_close(after(a, c), np.repeat(2 ** (-6 / lives), 3) * after(a) + after(c))


def test_the_delta_rule_erases_what_keys_return_and_nothing_else(float64):
    a, b = draw(0, (1, 8, 6), (1, 8, 6))
    pair, turned = jnp.concatenate([a, b]), jnp.concatenate([b, a])
    after = memory_after(corrects_errors=True)
    parts, both = after(pair), after(pair, turned)
    assert distance(both[0], parts.sum(0)) > 0.01
    assert distance(both[0], both[1]) > 0.01, "their order"
    # E_b S(a) + S(b), in which only S(a) is doubled.
    assert_close(after(pair, turned, times=2) - parts[::-1], 2 * (both - parts[::-1]))
    memory = CorrectingMemory(jnp.zeros((8, 6)), PrefixOptions(1.0, state_dtype=jnp.float64))
    first, second = (Writes(*draw(seed, (1, 4, 8), (1, 4, 6))) for seed in (3, 4))
    apart = [x._replace(keys=x.keys.at[..., i::2].set(0)) for i, x in enumerate((first, second))]
    write, zero = jax.jit(memory.write), memory.start(1)
    for is_exact, (x, y) in ((False, (first, second)), (True, apart)):
        whole = write(write(zero, x), y)
        assert (distance(whole, write(zero, x) + write(zero, y)) < 1e-12) == is_exact


A, B = np.random.default_rng(1).integers(0, 11, (2, 2 * CHUNK))


@pytest.mark.parametrize("method", ["ipttcd", "ipttcd_stream"])
def test_a_fresh_state_reads_a_memory_as_the_next_document_of_its_row(method, float64, tmp_path):
    settings = config_of(method).memory.replace(resets_at_document=False)
    layers = {"ipttcd": (0, 1), "ipttcd_stream": (1,)}[method]
    whole = model_of(method, fast_layers=layers, memory=settings)
    ids = jnp.repeat(jnp.arange(2), 2 * CHUNK)[None]
    want = jax.jit(lambda x: whole(x, ids))(jnp.asarray(np.concatenate([A, B])[None]))[0, -1]
    model = inference_model(whole)
    fresh, state = prefill(model, start_state(model, 2), np.stack([A, B]))
    one, other = memories_of(model, state)
    logits, state = prefill(model, start_from(model, [one, other]), np.stack([B, A]))
    assert_close(np.asarray(logits[0]), np.asarray(want))
    assert distance(fresh[1], want) > 0.01
    row, _ = memories_of(model, state)
    refused("the mean of no memory", mean, [])
    half = mean([3 * one, one - other, other / 1])
    name = max(one.layers)
    np.testing.assert_allclose(half.layers[name], 4 / 3 * one.layers[name], atol=1e-13)
    assert (row.tokens_read, half.tokens_read) == (8, 32)
    if method == "ipttcd_stream":  # frozen in tests/methods/test_stream.py
        return
    low, high = (distance(row.layers[x], (one + other).layers[x]) for x in sorted(row.layers))
    assert low < 1e-12
    assert high > 1e-3, "it reads what the lower one answers"
    again = read_memory(model, B[:-1], one)  # whose last chunk is open
    assert distance(again.layers[name], row.layers[name]) > 1e-3
    assert again.tokens_read == 15
    _, state = prefill(model, start_from(model, [one]), B[None, :-1])
    assert_same(memories_of(*frozen(model, state))[0].layers, again.layers)
    # A frozen state is saved as one; what it reads, it does not write.
    alone, state = frozen(model, start_from(model, [one, other]))
    save_state(tmp_path / "state", alone, state)
    assert_same(loaded := load_state(tmp_path / "state", alone), state)
    kept = memories_of(alone, prefill(alone, loaded, np.stack([B, A]))[1])
    assert_same([x.layers for x in kept], [one.layers, other.layers])


def drawn(model, seed=0):
    """A memory of a model, read from no text."""
    config, rng = model.config, np.random.default_rng(seed)
    dtype, shape = config.precision.state_dtype, (config.mlp_dim, config.dim)
    names = (f"layers/{i}/mlp" for i in config.fast_layers)
    layers = {name: rng.standard_normal(shape).astype(dtype) for name in names}
    return TextMemory(layers, 5, model_facts(model))


def silence(module, name):
    """Sets the taps of a convolution to zero but for a token's own."""
    for path, weight in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if path[-1] == name:
            weight[...] = weight[...] * (jnp.arange(3) == 2)[:, None]


DENSE = {"raw, windows": ({"output": "teacher_raw"}, 4), "own tap, full attention": ({}, None)}


@pytest.mark.parametrize("name", DENSE)
def test_a_plain_model_has_a_memory_in_its_weights(name, float64):
    memory, window = DENSE[name]
    memory = MemoryConfig(chunk_size=CHUNK, num_taps=3, corrects_errors=True, **memory)
    config = config_of("ipttcd", memory=memory, window=window, fast_layers=(0, 1))
    whole = randomize(Transformer, config, std=0.5)
    silence(whole, "teacher_conv")
    model = inference_model(whole)
    kept, found = drawn(model), []
    if window is None:  # a state with a place for every token of both
        kept = read_memory(model, A[:CHUNK], kept)
        assert kept.tokens_read == 5 + CHUNK
    alone, state = frozen(model, start_from(model, [kept], max_length=8))
    for _, hidden, _ in stream(alone, state, B[None]):
        found.append(np.asarray(hidden))
    forward = nnx.jit(lambda model: model.forward(jnp.asarray(B[None]))[0])
    plain = dense(whole, kept)
    hidden = np.asarray(forward(plain))
    assert_close(np.concatenate(found, axis=1), hidden, 1e-11)
    assert (plain.config.method, plain.config.memory) == ("swa" if window else "full", None)
    other = randomize(Transformer, config, std=0.25)
    refused("the memory is of other parameters", dense, other, kept)
    assert distance(forward(dense(whole, 0 * kept)), hidden) > 0.01


def test_narrow_weights_are_wide_once_a_memory_is_in_them():
    precision = Precision(param="bfloat16")
    memory = MemoryConfig(chunk_size=CHUNK, output="teacher_raw", eta=1e-3, normalizes_keys=False)
    whole = model_of("ipttcd", memory=memory, precision=precision)
    kept = drawn(inference_model(whole))
    plain, none = dense(whole, kept), dense(whole, 0 * kept)
    assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(plain, nnx.Param))} == {"float32"}
    weights = (by_name(nnx.to_pure_dict(nnx.state(x, nnx.Param))) for x in (plain, none))
    (change,) = (x - y for x, y in zip(*map(dict.values, weights), strict=True) if (x != y).any())
    assert distance(change[0], 1e-3 * kept.layers["layers/0/mlp"]) < 1e-4


def test_a_read_that_is_a_product_says_by_what(float64):
    x, t = draw(5, (1, 4, 6), (1, 4, 6))
    for cls, config, memory, conv in (
        (IPTTTMLP, IPTTTConfig, TargetMemoryConfig(), None),
        (IPTTTMLP, IPTTTConfig, TargetMemoryConfig(has_activation_conv=True), "activation_conv"),
        (IPTTCDMLP, IPTTCDConfig, MemoryConfig(output="student"), "student_conv"),
    ):
        mlp = layer(cls, config, memory.replace(is_conv_causal=True))
        if conv:
            refused(f"what {conv} makes of several tokens", mlp.read_scale, False)
            silence(mlp, conv)
        tokens = jax.tree.map(lambda x: x[:, None], mlp.tokens(x, t if conv is None else x))
        reads = mlp.operands(mlp.convolved(tokens, None))[0][:, 0]
        assert_close(reads, mlp.features(x) * mlp.read_scale(False))
    refused("output 'student'|second window", mlp.read_scale, True)


def test_what_has_no_memory_of_that_kind_is_refused_by_name():
    renormed = MemoryConfig(chunk_size=CHUNK, renorm_chunks=2)
    cases = [(x, {}) for x in ("ipttcd_ideal", "lact", "swa")]
    for method, changes in (*cases, ("ipttcd", {"memory": renormed})):
        config = config_of(method, precision=Precision(), **changes)
        model = inference_model(randomize(Transformer, config))
        refused(f"{config.label}|{method!r}|save its state", memories_of, model, None)
    for method, words in (
        ("ipttcd", "output 'teacher' reads what teacher_conv|output='teacher_raw'"),
        ("ipttcd_stream", "norm 1|keep the memory"),
    ):
        whole = model_of(method, precision=Precision())
        refused(words, dense, whole, drawn(inference_model(whole)))


def test_files_are_bit_for_bit_and_of_their_model_alone(tmp_path):
    config = config_of("ipttcd", fast_layers=(0, 1), precision=Precision())
    model, *others = (
        inference_model(randomize(Transformer, x, std=std))
        for x, std in ((config, 0.5), (config.replace(window=6), 0.5), (config, 0.25))
    )
    (kept := drawn(model)).save(folder := tmp_path / "book")
    names = {path.name for path in folder.iterdir()}
    assert names == {"memory.safetensors", "memory.json", "DIGEST.json"}
    again = load_memory(folder, model)
    assert_same(again.layers, kept.layers, strict=True)
    assert (again.tokens_read, again.facts, again.nbytes) == (5, kept.facts, 2 * 4 * 12 * 8)
    assert_same(sum([kept, again]).layers, (2 * kept).layers)
    for add in (lambda: kept + 1, lambda: 1 + kept):
        with pytest.raises(TypeError):
            add()
    shas = [model_facts(x)["parameters"][:12] for x in (model, others[1])]
    for other, words in zip(others, ("window: 4 -> 6", " not ".join(shas)), strict=True):
        refused(words, load_memory, folder, other, error=CheckpointError)
        refused(words, start_from, other, [kept])
        refused("the memory is of", lambda x: kept + x, drawn(other))
    refused("no saved memory", load_memory, tmp_path, model, error=CheckpointError)
    narrow = {name: s[:, :4] for name, s in kept.layers.items()}
    for number, (words, change) in enumerate(
        (
            ("another version of this library|layers/1/mlp", {"layers": narrow}),
            ("tokens_read '5' in memory.json", {"tokens_read": "5"}),
        )
    ):
        dataclasses.replace(kept, **change).save(odd := tmp_path / f"odd_{number}")
        refused(words, load_memory, odd, model, error=CheckpointError)
    flip(folder / "memory.safetensors")
    refused("damaged|memory.safetensors", load_memory, folder, model, error=CheckpointError)
