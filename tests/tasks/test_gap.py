"""The tasks gap and stream beside programs of numpy."""

import functools

import definitions
import numpy as np
import pytest
from checks import randomize, refused
from small_models import config_of, model_of, rows_of

from ttcd_jax import Precision, Transformer
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.measure.task import Subject
from ttcd_jax.tasks import gap
from ttcd_jax.tasks.gap import FOREIGN, STREAM, Gap, LayerGap, Share, Stream

LENGTH, WINDOW, SINKS = 150, 3, 2
DOCUMENTS = [np.random.default_rng(n).integers(0, 11, LENGTH) for n in range(3)]


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


def _expected(layers, embedding, window):
    found = []
    for tokens in DOCUMENTS:
        h = embedding[tokens]
        for layer in layers:
            _, _, z, student = layer(SINKS, WINDOW, h)
            h, _, _, y = layer(0, window, h)
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


def _recovered(layers, embedding, norm, window, at, rate):
    own, short = (0, window), (SINKS, WINDOW)

    def run(h, first, seen):
        for layer in layers[first:]:
            h = layer(*seen, h)[0]
        return h

    def losses(h, tokens):
        logits = np.asarray(definitions.norm(h, norm))[:-1] @ embedding.T
        top = logits.max(-1)
        lse = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        return lse - logits[np.arange(LENGTH - 1), tokens[1:]]

    found = []
    for tokens in DOCUMENTS:
        teacher = student = embedding[tokens]
        for layer in layers[: at + 1]:
            (teacher, _, _, x), (student, _, z, y) = layer(*own, teacher), layer(*short, student)
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


def _parts(model):
    """(a function (sinks, window, stream) of every layer, the embedding, the final norm)."""
    rows, ids = {x: np.asarray(y) for x, y in rows_of(model).items()}, np.zeros(LENGTH, int)

    def run(number, sinks, window, h):
        found = definitions.layer(model.config, rows, number, sinks, ids, window, h)
        return [*map(np.asarray, found)]

    layers = [functools.partial(run, number) for number in range(model.config.num_layers)]
    return layers, rows["embedding"], rows["final_norm"]


def _subject(model):
    return Subject(model, ByteTokenizer(), {"type": "imported"}, "nowhere")


def test_layers_and_shares_are_those_of_their_definitions(float64):
    model = model_of("swa", window=7, dim=8, scans_layers=False)
    task = Gap(windows=(WINDOW,), sinks=SINKS, length=LENGTH)
    records = [*task.measure(Scorer(model), DOCUMENTS, _subject(model))]
    layers, embedding, _ = _parts(model)
    for layer, record in enumerate(records):
        assert (record.layer, record.window) == (layer, WINDOW)
        expected = _expected(layers[: layer + 1], embedding, 7)
        np.testing.assert_allclose(record[2:], expected, rtol=1e-9, atol=1e-11)
    assert len(records) == 2


def test_what_comes_back_of_the_headroom_is_that_of_its_definition(float64):
    model = model_of("swa", window=40, num_layers=3, scans_layers=False)
    task = Stream(window=WINDOW, sinks=SINKS, layer=1, rate=0.2, length=LENGTH)
    records = [*task.measure(Scorer(model), DOCUMENTS, _subject(model))]
    expected = _recovered(*_parts(model), 40, 1, 0.2)
    assert [x.document for x in records] == [n for n in range(3) for _ in range(5)]
    np.testing.assert_allclose([x[2:] for x in records], expected, rtol=1e-7)
    assert [x["documents"] for x in task.table({"model": records})] == [3] * 5
    half = config_of("swa", window=40, num_layers=3, precision=Precision(compute="bfloat16"))
    (first, *_) = task.measure(Scorer(randomize(Transformer, half)), DOCUMENTS, _subject(model))
    assert first.headroom == pytest.approx(records[0].headroom, rel=0.2)


def test_a_model_with_a_memory_is_measured_and_a_mixer_without_windows_refused(float64):
    documents = [x[:70] for x in DOCUMENTS[:2]]
    for method in ("ipttcd", "ipttt", "full"):
        model = model_of(method)
        task = Gap(windows=(1, 2), length=70, layers=(1,))
        records = [*task.measure(Scorer(model), documents, _subject(model))]
        assert [(x.layer, x.window) for x in records] == [(1, 1), (1, 2)]
        assert len(task.table({"one": records, "two": records})) == 4
        numbers = {f"one, student's window {x.window}/1": x.context for x in records}
        assert task.numbers({"one": records}) == numbers
    subject = _subject(model_of("ipttcd_stream", fast_layers=(1,)))
    refused("of one stream, and 'ipttcd_stream'", Gap(windows=(1,), length=9).rows, subject)
    model = model_of("deltanet")
    for task, words in ((Gap(), "has no student"), (Stream(), "window 128 loses nothing: no")):
        refused(words, lambda x=task: [*x.measure(Scorer(model), documents, _subject(model))])


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
    subject = _subject(model_of("swa"))
    refused(words, task.replace(text=str(tmp_path)).rows, subject, error=error)


def test_the_last_third_of_the_shortest_stream_has_a_loss():
    model = model_of("swa")
    task, documents = Stream(length=4, window=1, sinks=0), [np.arange(4), np.arange(3, 7)]
    records = [*task.measure(Scorer(model), documents, _subject(model))]
    assert len(records) == 10
    assert all(np.isfinite(x.share) for x in records)
    refused("length 3 must be at least 4", task.replace, length=3)
    refused("max_documents 1 must be at least 2", task.replace, max_documents=1)


def test_two_models_are_compared_by_what_the_memory_itself_gives_back():
    one, two = ([Share(0, x, share, 0.5) for x in (STREAM, FOREIGN)] for share in (0.25, 0.125))
    shares = {f"share/{x}": 0.25 for x in (STREAM, FOREIGN)}
    assert shares.items() < Stream.numbers({"a": one}).items()
    assert Stream.differences([one], [two])[STREAM][0] == 0.125
    assert [*Stream.differences([one], [two])] == [STREAM]
    gaps = [LayerGap(0, 4, *[0.5] * 7)]
    assert [*Gap.differences([gaps], [gaps])] == ["student's window 4/0"]
