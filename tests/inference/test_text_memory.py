"""Memories of texts: sums that are exact and sums that are not, a fresh state with a memory, plain
models that have one in their weights, files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, assert_same, distance, draw, randomize, refused
from flax import nnx
from small_models import CHUNK, FLOAT64, config_of

from ttcd_jax.errors import CheckpointError
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import prefill, stream
from ttcd_jax.inference.saved_state import load_state, save_state
from ttcd_jax.inference.state import frozen, start_state
from ttcd_jax.inference.text_memory import (
    dense,
    load_memory,
    mean,
    memories_of,
    read_memory,
    start_from,
)
from ttcd_jax.memory.pieces import OpenChunk
from ttcd_jax.memory.prefix import PrefixOptions, Writes
from ttcd_jax.memory.running import CorrectingMemory
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.methods.ipttcd import IPTTCDMLP, IPTTCDConfig, MemoryConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.nn.row import Piece
from ttcd_jax.precision import Precision

MLP = MLPConfig(dim=6, hidden_dim=8, precision=FLOAT64)


class Layer:
    """A layer, and its S after texts (x, t), as if their tokens saw no others."""

    def __init__(self, **memory):
        config = IPTTCDConfig(mlp=MLP, memory=MemoryConfig(chunk_size=CHUNK, num_taps=3, **memory))
        self.mlp = randomize(IPTTCDMLP, config, std=0.7)

    def after(self, *texts, before=None):
        state, start = self.mlp.start(1), 0
        if before is not None:
            state = state._replace(chunks=OpenChunk(before, state.chunks.open))
        for x, t in texts:
            cuts = [*range(CHUNK - start % CHUNK, x.shape[1], CHUNK)]
            for part in zip(*(jnp.split(y, cuts, axis=1) for y in (x, t)), strict=True):
                piece = Piece.of(part[0], start, chunk_size=CHUNK)
                _, state = self.mlp.extend(part[0], piece, state, part[1])
                start += part[0].shape[1]
        return np.asarray(self.mlp.written(state, jnp.array([start])))


def text(seed, length):
    return draw(seed, (1, length, 6), (1, length, 6))


def test_what_is_exact_of_a_sum_and_what_is_not(float64):
    layer, a, b, odd = Layer(), text(0, 8), text(1, 7), text(2, 6)
    assert_close(layer.after(a, b), layer.after(a) + layer.after(b))
    assert_close(layer.after(a, text(3, 4), b), sum(map(layer.after, (text(3, 4), b, a))))
    assert distance(layer.after(odd, b), layer.after(odd) + layer.after(b)) > 0.01, "convolutions"
    plain = Layer(has_teacher_conv=False, has_student_conv=False)
    assert_close(plain.after(odd, b), plain.after(odd) + plain.after(b))
    lives = np.array([5.0, 80.0])
    layer = Layer(half_lives=tuple(lives.tolist()))
    left = np.repeat(2 ** (-b[0].shape[1] / lives), 3)
    assert_close(layer.after(a, b), left * layer.after(a) + layer.after(b))


def test_the_delta_rule_erases_what_keys_return_and_nothing_else(float64):
    layer, a, b = Layer(corrects_errors=True), text(0, 8), text(1, 8)
    both, one, other = layer.after(a, b), layer.after(a), layer.after(b)
    assert distance(both, one + other) > 0.01
    assert distance(both, layer.after(b, a)) > 0.01, "their order"
    assert_close(layer.after(b, before=one), both)
    assert_close(layer.after(b, before=2 * one) - other, 2 * (both - other))
    memory = CorrectingMemory(jnp.zeros((8, 6)), PrefixOptions(1.0, state_dtype=float))
    first, second = (Writes(x, y) for x, y in (draw(i, (1, 4, 8), (1, 4, 6)) for i in (3, 4)))
    apart = [x._replace(keys=x.keys.at[..., i::2].set(0)) for i, x in enumerate((first, second))]
    zero = memory.start(1)
    for is_exact, (x, y) in ((False, (first, second)), (True, apart)):
        whole, parts = (
            memory.write(memory.write(zero, x), y),
            [memory.write(zero, w) for w in (x, y)],
        )
        assert (distance(whole, sum(parts)) < 1e-12) == is_exact


A, B = np.random.default_rng(1).integers(0, 11, (2, 2 * CHUNK))


@pytest.mark.parametrize("method", ["ipttcd", "ipttcd_stream"])
def test_a_fresh_state_reads_a_memory_as_the_next_document_of_its_row(method, float64, tmp_path):
    settings = config_of(method).memory.replace(resets_at_document=False)
    layers = {"ipttcd": (0, 1), "ipttcd_stream": (1,)}[method]
    whole = randomize(Transformer, config_of(method, fast_layers=layers, memory=settings), std=0.5)
    model, both = inference_model(whole), np.concatenate([A, B])[None]
    ids = jnp.repeat(jnp.arange(2), 2 * CHUNK)[None]
    want = jax.jit(lambda x: whole(x, ids))(jnp.asarray(both))[0, -1]
    one, other = read_memory(model, A), read_memory(model, B)
    logits, state = prefill(model, start_from(model, [one, other]), np.stack([B, A]))
    assert_close(np.asarray(logits[0]), np.asarray(want))
    assert distance(prefill(model, start_state(model, 1), B[None])[0][0], want) > 0.01
    row, _ = memories_of(model, state)
    assert_close(row.layers, read_memory(model, B, one).layers)
    assert (row.tokens_read, read_memory(model, B, one).tokens_read) == (8, 16)
    if method == "ipttcd":
        low, high = (distance(row.layers[x], (one + other).layers[x]) for x in sorted(row.layers))
        assert low < 1e-12
        assert high > 1e-3, "it reads what the lower one answers"
    name = max(one.layers)
    half = mean([3 * one, one - other, other / 1])
    np.testing.assert_allclose(half.layers[name], 4 / 3 * one.layers[name], atol=1e-14)
    assert half.tokens_read == 32
    # A frozen state is saved as one; what it reads, it does not write.
    alone, state = frozen(model, start_from(model, [one]))
    save_state(tmp_path / "state", alone, state)
    assert_same(loaded := load_state(tmp_path / "state", alone), state)
    assert_same(memories_of(alone, prefill(alone, loaded, B[None])[1])[0].layers, one.layers)


def silence(model, name):
    """Sets the taps of a convolution to zero but for a token's own."""
    for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if str(path[-1]).startswith(name):
            weight[...] = weight[...] * (jnp.arange(3) == 2)[:, None]


PLAIN = {"num_layers": 2, "fast_layers": (0, 1)}
DENSE = {
    "teacher_raw": (MemoryConfig(output="teacher_raw", corrects_errors=True), {}, None),
    "its own tap, full attention": (MemoryConfig(), {"window": None}, "teacher_conv"),
    "no gap": (MemoryConfig(output="student"), {"student_window": 4}, "student_conv"),
    "IP-TTT": (TargetMemoryConfig(has_activation_conv=True, is_conv_causal=True), {}, "act"),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_plain_model_has_a_memory_in_its_weights(name, float64):
    memory, changes, taps = DENSE[name]
    method = "ipttcd" if isinstance(memory, MemoryConfig) else "ipttt"
    memory = memory.replace(chunk_size=CHUNK, num_taps=3)
    config = config_of(method, memory=memory, **PLAIN, **changes)
    whole = randomize(Transformer, config, std=0.5)
    if taps is not None:
        silence(whole, taps)
    model, found = inference_model(whole), []
    kept = read_memory(model, A)
    alone, state = frozen(model, start_from(model, [kept], max_length=8))
    for counts, hidden, _ in stream(alone, state, B[None], piece_size=CHUNK):
        found.append(np.asarray(hidden)[:, : counts[0]])
    plain = dense(whole, kept)
    hidden = nnx.jit(lambda model: model.forward(jnp.asarray(B[None]))[0])(plain)
    assert_close(np.concatenate(found, axis=1), np.asarray(hidden), 1e-11)
    assert (plain.config.method, plain.config.memory) == ("swa" if config.window else "full", None)
    without = dense(whole, 0 * kept)
    assert distance(nnx.jit(lambda x: x.forward(jnp.asarray(B[None]))[0])(without), hidden) > 0.01


def test_what_has_no_memory_of_that_kind_is_refused_by_name():
    for method in ("ipttcd_ideal", "lact", "deltanet", "swa"):
        model = inference_model(randomize(Transformer, config := config_of(method)))
        state = start_state(model, 1)
        refused(f"{config.label}|{method!r}|save its state", memories_of, model, state)
    renormed = config_of("ipttcd", memory=MemoryConfig(chunk_size=CHUNK, renorm_chunks=2))
    model = inference_model(randomize(Transformer, renormed))
    refused("'ipttcd'|save its state", memories_of, model, start_state(model, 1))
    for method, changes, words in (
        ("ipttcd", {}, "output 'teacher' reads what teacher_conv|output='teacher_raw'"),
        ("ipttcd", {"output": "student"}, "output 'student'|second window"),
        ("ipttcd_stream", {}, "norm 1|keep the memory"),
    ):
        settings = config_of(method).memory.replace(**changes)
        whole = randomize(Transformer, config_of(method, memory=settings))
        model = inference_model(whole)
        refused(words, dense, whole, memories_of(model, start_state(model, 1))[0])


def test_files_are_bit_for_bit_and_of_their_model_alone(tmp_path):
    config = config_of("ipttcd", num_layers=1, precision=Precision())
    model, *others = (
        inference_model(randomize(Transformer, x, std=std))
        for x, std in ((config, 0.5), (config.replace(window=6), 0.5), (config, 0.25))
    )
    empty, shape = memories_of(model, start_state(model, 1))[0], (config.mlp_dim, config.dim)
    drawn = np.random.default_rng(0).standard_normal(shape).astype("float32")
    kept = dataclasses.replace(empty, layers={"layers/0/mlp": drawn})
    kept.save(folder := tmp_path / "book")
    names = {path.name for path in folder.iterdir()}
    assert names == {"memory.safetensors", "memory.json", "DIGEST.json"}
    again = load_memory(folder, model)
    assert_same(again.layers, kept.layers, strict=True)
    assert (again.tokens_read, again.facts, again.nbytes) == (0, kept.facts, 4 * 12 * 8)
    for other, words in zip(others, ("window: 4 -> 6", " not "), strict=True):
        refused(words, load_memory, folder, other, error=CheckpointError)
        foreign = memories_of(other, start_state(other, 1))[0]
        refused(words if " not " in words else "window: 6 -> 4", lambda x: kept + x, foreign)
        refused(words, start_from, other, [kept])
    refused("no saved memory", load_memory, tmp_path, model, error=CheckpointError)
    data = bytearray((folder / "memory.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "memory.safetensors").write_bytes(data)
    refused("damaged|memory.safetensors", load_memory, folder, model, error=CheckpointError)
