"""Losses by context, position and recurrence equal plain computations from the model's logits;
perplexity by position that by hand."""

import dataclasses
import math
import re
from unittest import mock

import numpy as np
import pytest
from checks import logits_of, refused
from corpora import text_folder
from small_models import model_of

from ttcd_jax import Precision
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.sources import TextConfig
from ttcd_jax.data.tokenizer import ByteTokenizer, build_tokenizer, tokenizer_of, train_tokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.measure import by_document
from ttcd_jax.measure.results import evaluate, merged
from ttcd_jax.measure.scorer import Scores
from ttcd_jax.measure.task import Subject
from ttcd_jax.tasks.documents import FinalBlock, Position, Recurrence, distances
from ttcd_jax.tasks.perplexity import Perplexity, PositionLoss, by_position

LENGTHS = (40, 7, 55, 33, 36, 90, 34)
RNG = np.random.default_rng(0)
TEXTS = [bytes(RNG.choice([*b"abc "], length).tolist()) for length in LENGTHS]
ON, OFF = "mine, fast weights on", "mine, off (eta = 0)"


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    model = _model("ipttcd", vocab_size=258)
    data = {"type": "none", "seq_len": 32}
    return Subject(model, ByteTokenizer(), data, tmp_path_factory.mktemp("run"), "mine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_bytes(text)
    return str(folder)


def _losses(model, text):
    """The loss of every byte of a text but the first."""
    ids = np.frombuffer(text, np.uint8).astype(np.int32)
    logits = np.asarray(logits_of(model, ids[None, :-1])[0], np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(ids.size - 1), ids[1:]]


def _exact(task, result):
    """The table with means as numbers."""
    with mock.patch.object(
        by_document, "cells", lambda x, y, **_: dict(zip(x, y.mean, strict=True))
    ):
        return task.table(result.series)


def test_the_final_block_is_read_after_every_context_anew(subject, folder):
    options = {"contexts": (24, 3, 8, 3), "final_block": 6, "seq_len": 34, "token_budget": 150}
    task = FinalBlock(text=folder, batch_size=2, **options)
    result = evaluate(task, subject, 7)
    chosen = [text[-34:] for text in TEXTS if len(text) >= 30][:5]  # 34 + 34 + 33 + 34 + 34 > 150
    table = _exact(task, result)
    assert [row["context"] for row in table] == [3, 8, 24]
    for label, model in subject.variants().items():
        for row in table:
            context = row["context"]
            losses = [_losses(model, text[-context - 6 :])[-6:] for text in chosen]
            assert {len(x) for x in losses} == {6}
            found = [x[1:] for x in result.series[label] if x.context == context]
            expected = [pytest.approx(x.sum(), rel=1e-5) for x in losses]
            assert found == [(i, 6, nll) for i, nll in enumerate(expected)]
            assert row[label] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
        cells = [re.findall(r"[\d.]+", row[label]) for row in result.table]
        assert [mean for mean, _, _ in cells] == [f"{row[label]:.3f}" for row in table]
        for mean, low, high in ([*map(float, ends)] for ends in cells):
            assert 1 < low < mean < high  # symmetric in nats
            assert math.log(high / mean) == pytest.approx(math.log(mean / low), abs=1e-2)
    stats = result.facts["document_stats"]
    assert (stats["num_files"], stats["sampled_docs"], stats["eligible_docs"]) == (7, 6, 5)
    expected = [math.log(row[ON] / row[OFF]) for row in table]
    gains = [row["mine, on - off (nats)"] for row in table]
    assert gains == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_contexts_that_no_document_has_are_empty(subject, folder, caplog):
    options = {"contexts": (60, 80, 100), "final_block": 8, "seq_len": 120, "min_doc_tokens": 50}
    task = FinalBlock(text=folder, **options)
    records = [*task.measure(_Zeros(), task.rows(subject), subject)]
    assert "1 of 2 documents have fewer than 88 tokens" in caplog.text
    found = [(x.context, x.document, x.tokens) for x in records]
    assert found == [(60, 1, 8), (80, 1, 8), (100, None, 0)]
    last = task.table({"mine": records, "its": records})[-1]
    assert last == {"context": 100, "mine": None, "its": None}
    assert [*task.differences([records], [records])] == [60, 80]
    words = "has 90 tokens, and the shortest context and final_block 108"
    refused(words, task.replace(contexts=(100,)).rows, subject, error=DataError)


def test_a_manifest_repeats_an_evaluation(subject, folder, tmp_path):
    options = {"contexts": (4, 8), "final_block": 4, "seq_len": 16}
    task, path = FinalBlock(text=folder, **options), tmp_path / "documents.npz"
    first = evaluate(task, subject, 7)
    path.write_bytes((first.path / "documents.npz").read_bytes())
    again = FinalBlock(manifest=str(path), **options | {"seq_len": 99})  # chooses no documents
    second = evaluate(again, subject, 7)
    assert first.series == second.series
    series = {f"other{label}": x for label, x in second.series.items()}
    both = merged([first, dataclasses.replace(second, series=series)]).series
    assert [*both] == [ON, OFF, f"other{ON}", f"other{OFF}"]
    assert len(task.table(both)[0]) == 1 + 2 * 3
    pictures = task.pictures(tmp_path, both, None)
    assert [(tmp_path / x.path).read_bytes()[:4] for x in pictures] == [b"<svg"] * 2
    fewer = task.replace(token_budget=40)
    assert fewer.measured_on(fewer.rows(subject), subject) != first.measured_on
    for changes, words in (
        ({"measured_on": {"": "x"}}, "not measured on the same text"),
        ({"options": first.options | {"contexts": (4,)}}, "buckets"),
    ):
        refused(words, merged, [first, dataclasses.replace(first, **changes)])
    small = subject._replace(model=_model("full"))
    refused("outside the vocabulary of 11 tokens", again.rows, small, error=DataError)
    refused("both name documents: give one", FinalBlock, manifest=str(path), text=folder)


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        (FinalBlock, {"contexts": ()}, "contexts () must be one or more, such as 1024,2048"),
        (FinalBlock, {"seq_len": 31743}, "contexts up to 30720 and final_block 1024 |need 31744"),
        (FinalBlock, {"min_doc_tokens": 40_000}, "need 40000 tokens, and seq_len 32768"),
        (FinalBlock, {}, "none of 7 documents has 31744 tokens (longest: 90)"),
        (Position, {"seq_len": 91}, "none of 7 documents has 91 tokens (longest: 90)"),
        (Position, {}, "seq_len None is not 2 or more"),
        (Perplexity, {}, "seq_len None is not in 1 .. 1048576: pass --seq_len=N"),
        (Position, {"offset": 1, "offset_max": 2}, "offset 1 is fixed and offset_max 2 bounds"),
    ],
)
def test_what_does_not_fit_is_refused(task, options, words, subject, folder):
    none = subject._replace(data={"type": "none"})
    refused(words, lambda: task(text=folder, **options).rows(none))


def test_loss_by_position(subject, folder):
    task = Position(text=folder, seq_len=33, offset=2, max_rows=3)
    result = evaluate(task, subject, 7)
    chosen = [text[2:35] for text in TEXTS if len(text) >= 35][:3]
    for label, model in subject.variants().items():
        losses = np.array([_losses(model, text) for text in chosen])
        records = result.series[label]
        totals = [x for x in records if x.document is None]
        assert [x.start for x in totals] == [*range(1, 33)]
        means = [x.nll / x.tokens for x in totals]
        np.testing.assert_allclose(means, losses.mean(axis=0), rtol=1e-5)
        table = _exact(task, result)
        assert [row["positions"] for row in table] == ["1-31", "32-32", "all"]
        expected = [losses[:, :31].mean(), losses[:, 31:].mean(), losses.mean()]
        np.testing.assert_allclose([row[label] for row in table], expected, rtol=1e-5)
        starts = sorted({x.start for x in records if x.document is not None})
        assert starts == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 19, 23, 27, 32]
        (fine,) = (x for x in records if (x.start, x.document) == (27, 1))
        assert fine[4:] == (5, pytest.approx(losses[1, 26:31].sum(), rel=1e-5))
    assert result.facts["document_stats"]["min_doc_tokens"] == 35


def test_the_default_text_is_held_out_by_the_run(subject, tmp_path):
    lines = [f"Line {i} of a text, and another.\n" * 9 for i in range(8)]
    text_folder(tmp_path / "train", lines[4:])
    text_folder(tmp_path / "validation", lines[:4])
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(lines, 300))
    config = tokenizer_of(path)
    tokenizer = build_tokenizer(config)
    corpus = CorpusConfig(kind="text", path=str(tmp_path))
    data = TextConfig(corpus=corpus, tokenizer=config, seq_len=32)
    model = _model("ipttcd", vocab_size=300)
    subject = Subject(model, tokenizer, data.to_dict(), tmp_path)
    rows = Position(max_rows=3).rows(subject)
    expected = [tokenizer.encode(text)[:32] for text in lines[:3]]
    assert all(map(np.array_equal, rows.documents, expected))
    assert tokenizer.bos_id not in np.concatenate(rows.documents)
    block = FinalBlock(contexts=(4, 8), final_block=4, seq_len=12)
    ends = [tokenizer.encode(text)[-12:] for text in lines[:4]]
    assert all(map(np.array_equal, block.rows(subject).documents, ends))


def test_offsets_are_drawn_by_the_seed(subject, folder):
    task = Position(text=folder, seq_len=8, offset_max=20)
    rows = task.rows(subject).documents
    texts = [text for text in TEXTS if len(text) >= 28]
    starts = [text.find(bytes(ids.tolist())) for text, ids in zip(texts, rows, strict=True)]
    assert all(0 <= start <= 20 for start in starts)
    assert len(set(starts)) > 2
    for seed in (0, 1):
        again = task.replace(seed=seed).rows(subject).documents
        assert all(map(np.array_equal, rows, again)) is (seed == 0)


def _plain_distances(ids, size):
    found = []
    for t in range(len(ids)):
        gram = ids[t - size + 1 : t + 1]
        ends = [e for e in range(size - 1, t) if ids[e - size + 1 : e + 1] == gram]
        found.append(t - 1 - max(ends) if len(gram) == size and ends else -1)
    return found


def test_distances_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    for length, vocab_size in ((60, 2), (60, 5), (40, 300_000), (4, 1), (2, 1), (200, 12)):
        ids = rng.integers(vocab_size, size=length)
        for size in (2, 3, 4):
            expected = _plain_distances(ids.tolist(), size)
            assert distances(ids.astype(np.int32), size).tolist() == expected


def test_recurrence_slices_hold_every_token_once(subject, folder):
    task = Recurrence(text=folder, seq_len=54, window=6, reach=20)
    result = evaluate(task, subject, 7)
    chosen = [text[:54] for text in TEXTS if len(text) >= 54]
    table = {row["slice"]: row for row in _exact(task, result)}
    assert [*table][:4] == [
        f"n = 2, {x}"
        for x in ("new", "within the window (0-5)", "within reach (6-20)", "beyond (21-)")
    ]
    for label, model in subject.variants().items():
        losses = [_losses(model, text) for text in chosen]
        records = result.series[label]
        for size in (2, 3, 4):
            parts = [x for x in records if x.n == size]
            assert sum(x.tokens for x in parts) == 53 * len(chosen)
            assert sum(x.nll for x in parts) == pytest.approx(np.sum(losses), rel=1e-5)
            found = [_plain_distances([*text], size)[1:] for text in chosen]
            beyond = np.array(found) > 20
            expected = np.array(losses)[beyond].mean()
            assert table[f"n = {size}, beyond (21-)"][label] == pytest.approx(expected, rel=1e-5)
            new = np.array(losses)[np.array(found) < 0].mean()
            assert table[f"n = {size}, new"][label] == pytest.approx(new, rel=1e-5)
    row = table["n = 2, beyond (21-)"]
    gain = row["mine, on - off (nats)"]
    assert gain == pytest.approx(row[ON] - row[OFF], rel=1e-4)
    (shown,) = (x for x in task.table(result.series) if x["slice"] == row["slice"])
    assert shown["mine, on - off (nats)"] == f"{gain:.3f} (no interval)"  # three documents


def test_slices_are_by_the_model_unless_given(subject, folder):
    task = Recurrence(text=folder, seq_len=54)
    names = {x.slice for x in task.measure(_Zeros(), task.rows(subject), subject)}
    assert "n = 2, within the window (0-3)" in names  # windows of 4, in 2 layers
    assert "n = 2, beyond (7-)" in names
    full = subject._replace(model=_model("full", vocab_size=258))
    names = {x.slice for x in task.measure(_Zeros(), task.rows(full), full)}
    slices = ("new", "within the window (0-53)")
    assert names == {f"n = {n}, {x}" for n in (2, 3, 4) for x in slices}


class _Zeros:
    def losses(self, rows):
        return [Scores(np.zeros(len(x) - 1), np.zeros(len(x) - 1, bool)) for x in rows]


def _model(method, **changes):
    return model_of(method, precision=Precision(), **changes)


def test_perplexity_by_position_counts_marked_targets_and_their_bytes():
    length = 64
    losses = np.full((2, length), math.log(2))
    losses[:, 32:] = math.log(8)
    targets = np.full((2, length), 65)
    targets[0, 0] = ByteTokenizer().eos_id  # a target without bytes
    mask = np.ones((2, length), bool)
    mask[1, 32:] = False
    rows = {"tokens": targets, "targets": targets, "loss_mask": mask}
    *parts, whole = by_position(Scores(losses, losses > 0), rows, ByteTokenizer())
    expected = [("0-31", 0, 32, 64, 2, 64 / 63), ("32-63", 32, 64, 32, 8, 3)]
    assert parts == [(*x[:4], *map(pytest.approx, x[4:]), None) for x in expected]
    assert (whole.context, whole.tokens) == ("all", 96)
    short = {name: field[:, :20] for name, field in rows.items()}
    (only,) = by_position(Scores(losses[:, :20], losses[:, :20] > 0), short, ByteTokenizer())
    assert (only.context, only.tokens) == ("all", 40)


def test_differences_of_bits_per_byte_are_of_pairs_of_rows():
    """Of records of rows, without which there is no interval."""

    def records(factor: float, rows: int) -> list[PositionLoss]:
        nats = [factor * (3 + row) for row in range(rows)]
        found = [(sum(nats), None), *((x, row) for row, x in enumerate(nats))]
        found = [(x, 10 if row is not None else 10 * rows, row) for x, row in found]
        bits = [(x / math.log(2), size, row) for x, size, row in found]
        return [PositionLoss("all", 0, 5, 5, 2 ** (x / 5), x / n, row) for x, n, row in bits]

    mean, low, high = Perplexity.differences([records(2, 6)], [records(1, 6)])["all"]
    nats = np.arange(3, 9)[:, None] / math.log(2)
    expected = by_document.means_over_documents(nats, np.full((6, 1), 10.0))
    assert (mean, low, high) == pytest.approx([x[0] for x in expected])
    whole = [[x for x in records(factor, 6) if x.row is None] for factor in (2, 1)]
    mean, low, high = Perplexity.differences(whole[:1], whole[1:])["all"]
    assert mean == pytest.approx(expected.mean[0])
    assert math.isnan(low)
    # A row whose only target is an end counts in bits, as in the columns.
    eos = PositionLoss("all", 0, 5, 5, 2.0, None, 6)
    costly = [*records(2, 6), eos._replace(perplexity=8.0)]
    mean = Perplexity.differences([costly], [[*records(1, 6), eos]])["all"][0]
    assert mean == pytest.approx(expected.mean[0] + 5 * 2 / 60)
    # Where the last bucket has only ends of documents, the table and the differences have no bytes.
    ends = [PositionLoss("4-5", 4, 5, 1, 3.0, None, row) for row in (None, 0)]
    one, two = ([*records(factor, 1), *ends] for factor in (1, 2))
    found = Perplexity.differences([two], [one])
    assert [x[0] for x in found.values()] == [two[0].perplexity - one[0].perplexity, 0]
