"""The tasks gap and stream beside programs of numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from checks import randomize, refused
from flax import nnx
from small_models import config_of

from ttcd_jax import Precision, Transformer
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Subject
from ttcd_jax.nn.row import Row
from ttcd_jax.tasks import gap
from ttcd_jax.tasks.gap import Gap, Stream

LENGTH, WINDOW, SINKS = 150, 3, 2
DOCUMENTS = [np.random.default_rng(n).integers(0, 11, LENGTH) for n in range(3)]


def _norm(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _attended(attention, x, window, sinks):
    row = Row.of(jnp.asarray(x)[None])
    qkv, _ = attention.project(jnp.asarray(x)[None], row.positions)
    q, k, v = (np.asarray(a)[0] for a in qkv)
    i, j = np.indices((len(x), len(x)))
    is_seen = (j <= i) & ((i - j < (window or len(x))) | (j < sinks))
    score = np.einsum("TNH,SNH->NTS", q, k) / np.sqrt(q.shape[-1])
    score = np.where(is_seen, score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    out = np.einsum("NTS,SNH->TNH", weight / weight.sum(-1, keepdims=True), v)
    return out.reshape(len(x), -1) @ np.asarray(attention.out[...])


def _features(mlp, x):
    gate = x @ np.asarray(mlp.gate[...])
    return gate / (1 + np.exp(-gate)) * (x @ np.asarray(mlp.up[...]))


def _read(z, e, corrects, rate=gap.RATE, until=LENGTH, lag=gap.CHUNK):
    """(what is read, the memory) token by token; chunks of `lag` do not read what they write."""
    key = z / np.linalg.norm(z, axis=-1, keepdims=True)
    memory, read = np.zeros((z.shape[1], e.shape[1])), np.zeros_like(e)
    for t in range(len(z)):
        if t % lag == 0:
            seen = memory.copy()
        read[t] = key[t] @ seen
        if t < until:
            memory += np.outer(key[t], rate * (e[t] - key[t] @ memory) if corrects else e[t])
    return read, memory


def _share(e, prediction):
    half = len(e) // 2
    return 1 - ((e - prediction)[half:] ** 2).sum() / (e[half:] ** 2).sum()


def _layer(block, h, window, sinks):
    """(stream after the block, features, MLP output)."""
    norms = [np.asarray(getattr(block, f"{x}_norm")[...]) for x in ("mixer", "mlp")]
    h = h + _attended(block.mixer, _norm(h, norms[0]), window, sinks)
    z = _features(block.mlp, _norm(h, norms[1]))
    y = z @ np.asarray(block.mlp.down[...])
    return h + y, z, y


def _expected(blocks, embedding, layer):
    found = []
    for tokens in DOCUMENTS:
        h = embedding[tokens]
        for block in blocks[: layer + 1]:
            _, z, student = _layer(block, h, WINDOW, SINKS)
            h, _, y = _layer(block, h, block.mixer.config.window, 0)
        found.append((z, y - student, y))
    sizes, shares = [], []
    for at, (z, e, y) in enumerate(found):
        others = [x for n, x in enumerate(found) if n != at]
        mean = np.concatenate([x[1] for x in others]).mean(0)
        gram = sum(x[0].T @ x[0] for x in others)
        eye = np.trace(gram) / len(gram) * np.eye(len(gram))
        target = sum(x[0].T @ x[1] for x in others)
        fits = [z @ np.linalg.solve(gram + ridge * eye, target) for ridge in gap.RIDGES]
        linear = max(fits, key=lambda x, e=e: _share(e, x))
        total, half = _read(z, e, False)[0], LENGTH // 2
        best = (total[half:] * e[half:]).sum() / (total[half:] ** 2).sum()
        both = linear + _read(z, e - linear, True)[0]
        sizes.append(np.linalg.norm(e) / np.linalg.norm(y))
        predictions = mean, linear, best * total, _read(z, e, True)[0], both
        shares.append([_share(e, x) for x in predictions])
    shares = np.mean(shares, 0)
    return [np.mean(sizes), *shares, shares[-1] - shares[1]]


def _recovered(blocks, embedding, norm, at, rate):
    own, short = (blocks[0].mixer.config.window, 0), (WINDOW, SINKS)

    def run(h, first, seen):
        for block in blocks[first:]:
            h = _layer(block, h, *seen)[0]
        return h

    def losses(h, tokens):
        logits = _norm(h, norm)[:-1] @ embedding.T
        top = logits.max(-1)
        lse = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        return lse - logits[np.arange(LENGTH - 1), tokens[1:]]

    found = []
    for tokens in DOCUMENTS:
        teacher = student = embedding[tokens]
        for block in blocks[: at + 1]:
            (teacher, _, x), (student, z, y) = (
                _layer(block, h, *seen) for h, seen in ((teacher, own), (student, short))
            )
        found.append((student, z, teacher - student, x - y, run(teacher, at + 1, own)))
    shares, third = [], LENGTH // 3
    for number, (h, z, stream, local, last) in enumerate(found):
        others = [x for n, x in enumerate(found) if n != number]
        gram = sum(x[1].T @ x[1] for x in others)
        gram += np.trace(gram) / len(gram) * np.eye(len(gram))
        fixed = np.linalg.solve(gram, sum(x[1].T @ x[2] for x in others))
        foreign = _read(others[0][1], others[0][2], True, rate, lag=1)[1]
        added = [
            (_read(z, stream, True, rate, lag=1)[0], third),
            (_read(z, local, True, rate, lag=1)[0], third),
            (_read(z, stream, True, rate, 2 * third, 1)[0], 2 * third),
            (z @ fixed, third),
            (z / np.linalg.norm(z, axis=-1, keepdims=True) @ foreign, third),
        ]
        for change, start in added:
            ends = run(h, at + 1, short), run(h + change, at + 1, short), last
            top, new, low = (losses(x, DOCUMENTS[number])[start:].mean() for x in ends)
            shares.append(((top - new) / (top - low), top - low))
    return np.array(shares)


def _blocks(model):
    graph = gap.inference_model(model)
    return [nnx.merge(x, y) for x, y in zip(graph.blocks, graph.layers, strict=True)]


def _subject(model):
    return Subject(model, ByteTokenizer(), {"type": "imported"}, "nowhere")


def test_layers_and_shares_are_those_of_their_definitions(float64):
    model = randomize(Transformer, config_of("swa", window=7, dim=8, scans_layers=False))
    task = Gap(windows=(WINDOW,), sinks=SINKS, length=LENGTH)
    records = task.measure(Scorer(model), DOCUMENTS, _subject(model))
    for layer, record in enumerate(records):
        assert (record.layer, record.window) == (layer, WINDOW)
        expected = _expected(_blocks(model), np.asarray(model.embedding[...]), layer)
        np.testing.assert_allclose(record[2:], expected, rtol=1e-9, atol=1e-11)
    assert len(records) == 2


def test_what_comes_back_of_the_headroom_is_that_of_its_definition(float64):
    model = randomize(Transformer, config_of("swa", window=40, num_layers=3, scans_layers=False))
    task = Stream(window=WINDOW, sinks=SINKS, layer=1, rate=0.2, length=LENGTH)
    records = task.measure(Scorer(model), DOCUMENTS, _subject(model))
    embedding, norm = (np.asarray(x[...]) for x in (model.embedding, model.final_norm))
    expected = _recovered(_blocks(model), embedding, norm, 1, 0.2)
    assert [x.document for x in records] == [n for n in range(3) for _ in range(5)]
    np.testing.assert_allclose([x[2:] for x in records], expected, rtol=1e-7)
    assert [x["documents"] for x in task.table({"model": records})] == [3] * 5
    half = config_of("swa", window=40, num_layers=3, precision=Precision(compute="bfloat16"))
    (first, *_) = task.measure(Scorer(randomize(Transformer, half)), DOCUMENTS, _subject(model))
    assert first.headroom == pytest.approx(records[0].headroom, rel=0.2)


def test_a_model_with_a_memory_is_measured_and_a_mixer_without_windows_refused(float64):
    documents = [x[:70] for x in DOCUMENTS[:2]]
    for method in ("ipttcd", "ipttt", "full"):
        model = randomize(Transformer, config_of(method))
        task = Gap(windows=(1, 2), length=70, layers=(1,))
        records = task.measure(Scorer(model), documents, _subject(model))
        assert [(x.layer, x.window) for x in records] == [(1, 1), (1, 2)]
        assert len(task.table({"one": records, "two": records})) == 4
        numbers = {f"one, student's window {x.window}/1": x.context for x in records}
        assert task.numbers({"one": records}) == numbers
    model = randomize(Transformer, config_of("deltanet"))
    for task, words in ((Gap(), "has no student"), (Stream(), "window 128 loses nothing: no")):
        refused(words, task.measure, Scorer(model), documents, _subject(model))


@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        (Stream(length=9, window=4), UserError, "window 4 with 4 sinks loses nothing of the 4 to"),
        (Gap(length=5, windows=(1,)), UserError, "window 1 with 4 sinks loses nothing of the 4 to"),
        (Stream(length=9, window=2, layer=2), UserError, "layer 2 of a model of 2"),
        (Gap(length=50, layers=(2,)), UserError, "layers (2,) of a model of 2"),
        (Gap(length=50, windows=(1,)), DataError, "1 documents have 50 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, task, error, words):
    for number, length in enumerate((99, 9)):
        (tmp_path / f"{number}.txt").write_text("a" * length)
    subject = _subject(randomize(Transformer, config_of("swa")))
    refused(words, task.replace(text=str(tmp_path)).rows, subject, error=error)
