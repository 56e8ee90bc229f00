"""The choice of documents, its manifest, and intervals over documents."""

import io
import itertools
import json

import numpy as np
import pytest
import scipy.stats
import tokenizers
from checks import assert_same, refused
from corpora import json_lines, text_file

from ttcd_jax.data.corpus import load_documents
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.tokenizer import ByteTokenizer, build_tokenizer, tokenizer_of, train_tokenizer
from ttcd_jax.errors import DataError
from ttcd_jax.measure import by_document
from ttcd_jax.measure.by_document import Means, Selection, means_of, means_over_documents, select
from ttcd_jax.tasks.documents import BlockLoss, FinalBlock

TEXTS = {"a": b"abcdefghij", "b": b" \n\t ", "c": b"klm", "d": b"nopqrstuvwxyz", "e": b"0123456"}


def _documents(path):
    """The records of a file or folder, and its documents."""
    records = encode_documents(load_documents(text_file(path), "train"), ByteTokenizer())
    return records, by_document.plain_documents([records], ByteTokenizer())


@pytest.fixture
def folder(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_bytes(text)
    return tmp_path


def test_documents_have_no_special_tokens_and_blank_ones_are_left_out(folder):
    records, documents = _documents(folder)
    assert [bytes(ids.tolist()) for ids in documents] == [TEXTS[name] for name in "acde"]
    assert records.num_files == 5
    texts = by_document.first_texts([records, records], ByteTokenizer(), 15)  # of 12 and 3 tokens
    assert [*texts] == ["abcdefghij", " \n"]
    (folder / "x.jsonl").write_bytes(json_lines(("one", "", " ", "two")))
    records, documents = _documents(folder / "x.jsonl")
    assert (records.num_files, len([*documents])) == (1, 2)


def test_the_first_long_enough_documents_are_chosen_up_to_the_budget(folder):
    kept = (ids[-9:] for ids in _documents(folder)[1])
    chosen = select(kept, lambda ids: ids, min_tokens=7, max_tokens=18)
    texts = [bytes(ids.tolist()) for ids in chosen.documents]
    assert texts == [b"bcdefghij", b"rstuvwxyz"]  # 18 tokens: the last document is not looked at
    stats = chosen.stats
    assert (stats["sampled_docs"], stats["eligible_docs"], stats["min_doc_tokens"]) == (3, 2, 7)
    assert stats["selected_total_tokens"] == stats["eligible_total_tokens"] == 18
    quantiles = dict.fromkeys(("p50", "p75", "p90", "p95", "p99", "max"), 9)
    assert stats["selected_doc_length_quantiles"] == quantiles
    long = [np.zeros(n, np.int32) for n in (10, 3000, 20_000, 5000)]
    stats = select(long, lambda ids: ids[:7], min_tokens=2048, max_documents=2).stats
    assert (stats["sampled_docs"], stats["selected_total_tokens"]) == (3, 14)
    assert stats["sampled_doc_length_quantiles"]["p90"] == 3000  # index int(2 * 0.9)
    assert [stats[f"sampled_docs_ge_{n}"] for n in (2048, 4096, 32768)] == [2, 1, 0]
    assert (stats["eligible_docs_ge_16384"], stats["eligible_tokens_ge_2048"]) == (1, 23_000)
    words = "none of 4 documents has 14 tokens (longest: 13): take"
    documents = _documents(folder)[1]
    refused(words, select, documents, lambda ids: ids, min_tokens=14, error=DataError)


def test_a_manifest_gives_the_same_selection(tmp_path):
    def selected():
        return Selection([np.arange(5), np.arange(3, 10)], {"min_doc_tokens": 12}, "byte")

    path, selection, others = tmp_path / "documents.npz", selected(), [selected() for _ in range(3)]
    path.write_bytes(selection.manifest())
    with np.load(path) as arrays:
        assert (arrays["flat_tokens"].dtype, arrays["lengths"].dtype) == (np.int32, np.int32)
        assert arrays["lengths"].tolist() == [5, 7]
        assert json.loads(str(arrays["document_stats_json"])) == selection.stats
    read = by_document.read_manifest(path, "byte")
    assert_same([*read.documents], selection.documents)
    assert (read.stats, read.digest) == (selection.stats, selection.digest)
    others[0].documents[1][0] += 1
    others[1].stats["min_doc_tokens"] = 1
    others[2].documents[:] = [np.arange(4), np.array([4, *range(3, 10)])]  # the same flat tokens
    assert len({selection.digest, *(x.digest for x in others)}) == 4


def _npz(**changes):
    arrays = {"flat_tokens": np.arange(6), "lengths": np.array([2, 4])}
    arrays |= {"document_stats_json": np.array("{}")} | changes
    file = io.BytesIO()
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return file.getvalue()


_HUGE = _npz().replace(b"'shape': (6,), ", b"'shape': (9" + b"9" * 13)  # the header of the tokens


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_npz(tokenizer=np.array("f" * 64)), "made by another tokenizer (ffffffffffff) than"),
        (_npz(lengths=np.array([2, 5])), "it has 6 tokens, and other lengths: [2 5]"),
        (_npz(lengths=np.array([1, 5])), "its arrays are of another kind"),
        (_npz(lengths=np.array([2**62] * 4 + [6])), "it has 6 tokens, and other lengths"),
        (_npz(lengths=np.zeros(0, int)), "its arrays are of another kind"),
        (_npz(flat_tokens=np.ones(6)), "its arrays are of another kind"),
        (_npz(flat_tokens=np.array([{}])), "is no manifest of documents"),
        (_npz(lengths=None), "is no manifest of documents"),
        (_npz(document_stats_json=np.array("[]")), "is a list, not"),
        (_npz()[:200], "is no manifest of documents"),
        (_HUGE, "is no manifest of documents"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_manifest_is_refused_and_that_of_the_authors_is_read(tmp_path, content, words):
    path = tmp_path / "documents.npz"
    path.write_bytes(_npz())
    documents = by_document.read_manifest(path, "x").documents
    assert [ids.tolist() for ids in documents] == [[0, 1], [2, 3, 4, 5]]
    path.unlink() if content is None else path.write_bytes(content)
    refused(words, by_document.read_manifest, path, "byte", error=DataError)


def test_a_tokenizer_has_one_digest(tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    paths[0].write_text(train_tokenizer(["some text"] * 3, 260))
    tokenizer = tokenizers.Tokenizer.from_file(str(paths[0]))
    tokenizer.enable_truncation(4)
    tokenizer.save(str(paths[1]))
    first, second = (build_tokenizer(tokenizer_of(path)) for path in paths)
    assert first.digest == second.digest != ByteTokenizer().digest


def test_intervals_of_one_seed_are_students_t_over_equal_documents():
    sums, tokens = np.random.default_rng(0).normal(5, 2, (5, 3)), np.full((5, 3), 7.0)
    expected = scipy.stats.ttest_1samp(sums, 0).confidence_interval(0.95)
    for found in (means_over_documents(7 * x, tokens) for x in (sums, sums[None])):
        np.testing.assert_allclose(found, (sums.mean(0), expected.low, expected.high))
    assert not np.any(means_over_documents(np.zeros((2, 5, 3)), tokens))


def test_intervals_cover_the_mean_of_documents_of_any_length():
    """About 95 % of 2,000 draws, of documents whose loss does not depend on their length."""
    rng = np.random.default_rng(1)
    tokens = np.tile(rng.integers(10, 1000, (40, 1)), 2_000).astype(float)
    _, low, high = means_over_documents(tokens * rng.normal(3, 1, (40, 2_000)), tokens)
    assert 0.93 < np.mean((low < 3) & (high > 3)) < 0.97


@pytest.mark.parametrize("spread", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0.3, 1, 0.3)])
@pytest.mark.parametrize("sizes", [(1,) * 16, (1,) * 8 + (2, 2, 2, 3, 3, 14)])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_cover_the_mean_of_seeds_and_documents(seeds, sizes, spread):
    """As docs/evaluation.md says, of 4,000 draws: however much of it seeds, documents and the rest
    each vary, also of documents of which one is a third of all."""
    documents, counts = len(sizes), np.tile(np.array(sizes, float)[:, None], 4_000)
    rng, parts = np.random.default_rng(2), ((seeds, 1), (1, documents), (seeds, documents))
    draws = (x * rng.normal(size=(*size, 4_000)) for x, size in zip(spread, parts, strict=True))
    _, low, high = means_over_documents(counts * sum(draws), counts)
    covered = np.mean((low < 0) & (high > 0))
    assert covered > 0.935
    assert covered < 0.99 or spread == (0, 0, 1)


def test_intervals_of_fewer_than_five_documents_are_unknown():
    sums = np.array([[6.0, 4, 0], [2, 2, 0], [4, 4, 0], [4, 4, 0], [4, 0, 0]])
    counts = np.where(sums > 0, 2.0, 0)
    mean, low, high = means_over_documents(sums, counts)
    assert mean[:2].tolist() == [2, 1.75]
    # The sums 6 and 2 differ by 2 from two tokens at the mean: the half is t(4) sqrt(8 * 5/4) / 10.
    np.testing.assert_allclose((low[0], high[0]), (2 - 0.877989, 2 + 0.877989), rtol=1e-5)
    assert np.isnan([mean[2], *low[1:], *high[1:]]).all()


def test_differences_of_variants_are_paired_by_document():
    rng = np.random.default_rng(0)
    hardness = rng.normal(5, 2, 50)
    gains = rng.normal(0.1, 0.01, 50)
    on = [BlockLoss(8, i, 10, 10 * x) for i, x in enumerate(hardness - gains)]
    off = [BlockLoss(8, i, 10, 10 * x) for i, x in enumerate(hardness)]
    series = {"run, fast weights on": on, "run, off (eta = 0)": off[::-1], "other": off}
    means, pairs = means_of(series, lambda record: "all")
    assert [*pairs] == ["run"]
    _, (mean, low, high) = pairs["run"]
    assert mean[0] == pytest.approx(-gains.mean())
    assert high[0] - low[0] < 0.01 < 0.5 < np.ptp(means["other"][1][1:])
    series |= {"run, off (eta = 0)": off[1:]}
    refused("on other tokens", means_of, series, lambda record: "all")


def test_the_share_of_the_headroom_is_a_ratio_of_totals():
    """Between full attention and a window; a model under the window is neither."""
    rng = np.random.default_rng(0)
    low, room = rng.normal(30, 2, (8, 2)), rng.normal(4, 1, (8, 2))
    given = 0.3 * room + rng.normal(0, 0.1, (8, 2))
    losses = {"full": low, "window": low + room, "memory": low + room - given}
    near = low + rng.normal(0, 1, low.shape)
    series = {
        name: [BlockLoss(j, i, 10, float(nll)) for (i, j), nll in np.ndenumerate(x)]
        for name, x in (losses | {"nothing": low + room, "near": near}).items()
    }
    rows = FinalBlock.headroom([series], "window", "full")
    assert [row["context"] for row in rows] == [0, 1, "all"]
    for row, part in zip(rows, ((0,), (1,), (0, 1)), strict=True):
        x, y = given[:, part].sum(1), room[:, part].sum(1)
        share = x.sum() / y.sum()
        spread = np.sqrt(((x - share * y) ** 2).sum() / 7 * 8) / y.sum()
        half = scipy.stats.t.ppf(0.975, 7) * spread
        assert row["memory"] == f"{share:.3f} ± {half:.3f}"
        assert row["nothing"] == "0.000 ± 0.000"
    other = series | {"full": series["full"][2:]}
    refused("other tokens", FinalBlock.headroom, [other], "window", "full")
    *_, twice = FinalBlock.headroom([series, series], "window", "full")
    assert twice["memory"] == rows[-1]["memory"]  # nothing is of the seed
    rows = FinalBlock.headroom([series], "near", "full")
    assert {row["memory"] for row in rows} == {None}  # no headroom that is seen
    few = {name: records[:8] for name, records in series.items()}  # no interval
    for ceiling, has_share in ("full", True), ("window", False):
        control = "window" if has_share else "memory"
        *_, whole = FinalBlock.headroom([few], control, ceiling)
        assert (whole["nothing"] is not None) == has_share


def test_a_mean_and_its_interval_are_one_cell():
    nan = float("nan")
    means = Means(*np.array([[2.3456, 2.3, nan, 5e9], [2.3, nan, nan, 4e9], [2.4, nan, nan, 6e9]]))
    expected = ["2.346 ± 0.050", "2.300 (no interval)", None, "5.000e+09 ± 1.000e+09"]
    assert [*by_document.cells([8, 16, 32, 64], means).values()] == expected
    ends = by_document.cells([8], Means(*np.exp([[0.7], [0.1], [1.3]])), has_ends=True)
    assert ends == {8: "2.014 (1.105 to 3.669)"}


@pytest.mark.parametrize(("seeds", "documents"), [(3, 12), (8, 8), (2, 6)])
def test_intervals_over_seeds_and_documents_hold_what_they_promise(seeds, documents):
    """2,000 studies of three sources of variance each, documents of many lengths, means per token
    and shares of what differs by seed; those over documents of the mean of the seeds do not hold it
    where seeds differ."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 400, (documents, 1)) * np.ones((1, 2000))
    for of_seed, of_document, rest in itertools.product((0, 0.3, 1), (0.1, 1), (0.1, 1)):
        shapes = (seeds, 1, 2000), (1, documents, 2000), (seeds, documents, 2000)
        sizes = of_seed, of_document, rest
        draws = (x * rng.standard_normal(y) for x, y in zip(sizes, shapes, strict=True))
        drawn = 2 + sum(draws)
        for counts in (tokens * rng.uniform(0.5, 1.5, shapes[2]), tokens):
            found = means_over_documents(sums := counts * drawn, counts)
            assert 0.93 < ((found.low <= 2) & (found.high >= 2)).mean() <= 1, sizes
        alone = means_over_documents(sums.sum(axis=0), seeds * tokens)
        np.testing.assert_allclose(found.mean, alone.mean)
        if of_seed == 1:
            assert ((alone.low <= 2) & (alone.high >= 2)).mean() < 0.9
