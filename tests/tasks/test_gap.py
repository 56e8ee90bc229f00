"""The task gap beside a program of numpy: layers, shares of the mean, a ridge, memories."""

import jax.numpy as jnp
import numpy as np
import pytest
from checks import randomize
from flax import nnx
from small_models import config_of

from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Subject
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.nn.row import Row
from ttcd_jax.tasks import gap
from ttcd_jax.tasks.gap import Gap

LENGTH, WINDOW, SINKS = 150, 3, 2
DOCUMENTS = [np.random.default_rng(n).integers(0, 11, LENGTH) for n in range(3)]


def _norm(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _attended(attention, x, window, sinks):
    row = Row.of(jnp.asarray(x)[None])
    q, k, v = (np.asarray(a)[0] for a in attention.project(jnp.asarray(x)[None], row.positions))
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


def _read(z, e, corrects):
    """Token by token; what was written since the chunk began is not read."""
    key = z / np.linalg.norm(z, axis=-1, keepdims=True)
    memory, read = np.zeros((z.shape[1], e.shape[1])), np.zeros_like(e)
    for t in range(len(z)):
        if t % gap.CHUNK == 0:
            seen = memory.copy()
        read[t] = key[t] @ seen
        left = gap.RATE * (e[t] - key[t] @ memory) if corrects else e[t]
        memory += np.outer(key[t], left)
    return read


def _share(e, prediction):
    half = len(e) // 2
    return 1 - ((e - prediction)[half:] ** 2).sum() / (e[half:] ** 2).sum()


def _expected(blocks, embedding, layer):
    found = []
    for tokens in DOCUMENTS:
        h = embedding[tokens]
        for number, block in enumerate(blocks):
            norms = [np.asarray(getattr(block, f"{x}_norm")[...]) for x in ("mixer", "mlp")]
            inputs = [
                _norm(h + _attended(block.mixer, _norm(h, norms[0]), *seen), norms[1])
                for seen in ((block.mixer.config.window, 0), (WINDOW, SINKS))
            ]
            down = np.asarray(block.mlp.down[...])
            z_T, z_S = (_features(block.mlp, x) for x in inputs)
            if number == layer:
                found.append((z_S, (z_T - z_S) @ down, z_T @ down))
            h = h + _attended(block.mixer, _norm(h, norms[0]), block.mixer.config.window, 0)
            h = h + z_T @ down
    sizes, shares = [], []
    for at, (z, e, y) in enumerate(found):
        others = [x for n, x in enumerate(found) if n != at]
        mean = np.concatenate([x[1] for x in others]).mean(0)
        gram = sum(x[0].T @ x[0] for x in others)
        eye, target = (
            np.trace(gram) / len(gram) * np.eye(len(gram)),
            sum(x[0].T @ x[1] for x in others),
        )
        fits = [z @ np.linalg.solve(gram + ridge * eye, target) for ridge in gap.RIDGES]
        linear = max(fits, key=lambda x, e=e: _share(e, x))
        total, half = _read(z, e, False), LENGTH // 2
        best = (total[half:] * e[half:]).sum() / (total[half:] ** 2).sum()
        both = linear + _read(z, e - linear, True)
        sizes.append(np.linalg.norm(e) / np.linalg.norm(y))
        predictions = mean, linear, best * total, _read(z, e, True), both
        shares.append([_share(e, x) for x in predictions])
    shares = np.mean(shares, 0)
    return [np.mean(sizes), *shares, shares[-1] - shares[1]]


def _subject(model, **changes):
    return Subject(model, ByteTokenizer(), {"type": "imported"}, "nowhere", **changes)


def test_layers_and_shares_are_those_of_their_definitions(float64):
    model = randomize(Transformer, config_of("swa", window=7, dim=8, scans_layers=False))
    task = Gap(windows=(WINDOW,), sinks=SINKS, length=LENGTH)
    records = task.measure(Scorer(model), DOCUMENTS, _subject(model))
    graph = gap.inference_model(model)
    blocks = [nnx.merge(x, y) for x, y in zip(graph.blocks, graph.layers, strict=True)]
    for layer, record in enumerate(records):
        assert (record.layer, record.window) == (layer, WINDOW)
        expected = _expected(blocks, np.asarray(model.embedding[...]), layer)
        np.testing.assert_allclose(record[2:], expected, rtol=1e-9, atol=1e-11)
    assert len(records) == 2


def test_a_model_with_a_memory_is_measured_and_a_mixer_without_windows_refused(float64):
    documents = [x[:70] for x in DOCUMENTS[:2]]
    for method in ("ipttcd", "ipttt", "full"):
        model = randomize(Transformer, config_of(method))
        task = Gap(windows=(1, 2), length=70, layers=(1,))
        records = task.measure(Scorer(model), documents, _subject(model))
        assert [(x.layer, x.window) for x in records] == [(1, 1), (1, 2)]
        assert len(task.table({"one": records, "two": records})) == 4
    model = randomize(Transformer, config_of("deltanet"))
    with pytest.raises(UserError, match="has no student"):
        Gap(length=70).measure(Scorer(model), documents, _subject(model))


@pytest.mark.parametrize(
    ("texts", "options", "error", "words"),
    [
        (["a" * 99], {}, DataError, "1 documents have 50 tokens"),
        (["a" * 99, "b" * 9], {}, DataError, "1 documents have 50 tokens"),
        (["a" * 99, "b" * 99], {"layers": (2,)}, UserError, "layers .2,. of a model of 2"),
    ],
)
def test_documents_and_layers_that_are_not_there_are_refused(
    tmp_path, texts, options, error, words
):
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    model = randomize(Transformer, config_of("swa"))
    with pytest.raises(error, match=words):
        Gap(length=50, text=str(tmp_path), **options).rows(_subject(model))
