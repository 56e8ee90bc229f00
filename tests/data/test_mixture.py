"""Mixtures of corpora: their order, their stages by step, texts beside records."""

import hashlib
from collections.abc import Sequence

import corpora
import numpy as np
import pytest
from checks import assert_same

from ttcd_jax.data.mixture import MixedRows, RecordsConfig, corpus_rows
from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.sources import MixtureConfig, TextConfig, text_data
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.errors import DataError, UserError

BATCH = 4
SEQ_LEN = 16


def _corpus(seed, num_documents, mean):
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *(2 + rng.geometric(1 / mean, num_documents))])
    ids = rng.integers(2, 250, starts[-1]).astype(np.uint16)
    return TokenRecords([ids], starts, vocab_size=256, eos_id=1)


@pytest.mark.parametrize(
    ("weights", "digest"), [(None, "e79ed513b1d2dcc9"), ((8, 2, 0.7), "b60e9288240308a7")]
)
def test_the_order_is_that_of_every_run_so_far(weights, digest):
    """Digests from grain's `MapDataset.mix`, which mixed the rows at first."""
    parts = [
        corpus_rows(
            _corpus(i, *sizes), seq_len=16, packing="concatenate", seed=3, shuffle_seed=3 + i
        )
        for i, sizes in enumerate([(40, 50), (60, 9), (5, 300)])
    ]
    weights = weights or [size for _, size in parts]
    rows = MixedRows([rows for rows, _ in parts], [(0, weights)])
    found = hashlib.sha256()
    for index in (*range(500), *range(10**6, 10**6 + 100), 2**31 - 2):
        row = rows[index]
        for name in sorted(row):
            found.update(row[name].tobytes())
    assert found.hexdigest()[:16] == digest


class Numbered(Sequence):
    """Row i is (name, i)."""

    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 2**31

    def __getitem__(self, index):
        return self.name, index


STAGES = [(0, (8, 2, 0)), (103, (5, 0, 5)), (104, (1, 1, 1)), (1000, (0, 0, 2)), (1007, (3, 1, 6))]


def test_every_part_goes_on_where_the_stage_before_left_it():
    rows = MixedRows([Numbered(name) for name in range(3)], STAGES)
    drawn = [rows[index] for index in range(3000)]
    for name in range(3):
        numbers = [number for part, number in drawn if part == name]
        assert numbers == list(range(len(numbers)))
    ends = [start for start, _ in STAGES[1:]] + [3000]
    for (start, weights), end in zip(STAGES, ends, strict=True):
        parts = np.array([part for part, _ in drawn[start:end]])
        for name, weight in enumerate(weights):
            share = weight / sum(weights) * np.arange(1, end - start + 1)
            assert np.all(np.abs(np.cumsum(parts == name) - share) < 2)
    for index in np.random.default_rng(0).permutation(3000)[:300]:
        assert MixedRows(rows._parts, STAGES)[index] == drawn[index]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Records of the letters a and b, and text of the letter c."""
    place = tmp_path_factory.mktemp("mixture")
    for letter in "ab":
        texts = [letter * (9 + i) for i in range(20)]
        corpus = corpora.text_folder(place / f"{letter}.text", texts, validation_percent=30)
        corpora.records(corpus, place / letter)
    texts = ["c" * (3 + 2 * i) for i in range(30)]
    corpus = corpora.text_folder(place / "c.text", texts, validation_percent=30)
    return MixtureConfig(
        parts=(
            RecordsConfig(paths=str(place), folders=("a", "b"), weights=(3, 1), seq_len=SEQ_LEN),
            TextConfig(
                corpus=corpus, tokenizer=TokenizerConfig(), packing="best_fit", seq_len=SEQ_LEN
            ),
        ),
        stages=((0, (8, 2)), (5, (0, 1)), (7, (1, 1))),
        seq_len=SEQ_LEN,
    )


def _letters(batches, steps):
    """How many rows of the steps hold each of a, b and c."""
    tokens = np.concatenate([batches.at(step)["tokens"] for step in steps])
    return [int((tokens == ord(letter)).any(axis=1).sum()) for letter in "abc"]


def test_texts_and_records_mix_by_step(mixture):
    rows, manifest = mixture.rows(1, BATCH)
    batches = Batches(rows, batch_size=BATCH)
    assert _letters(batches, range(5)) == [12, 4, 4]
    assert _letters(batches, range(5, 7)) == [0, 0, 8]
    assert _letters(batches, range(7, 27)) == [30, 10, 40]
    both = mixture.replace(weights=(8, 2), stages=mixture.stages[1:])
    for step in (0, 4, 5, 7, 100):
        assert_same(Batches(both.rows(1, BATCH)[0], batch_size=BATCH).at(step), batches.at(step))
    records, text = (part.rows(1)[1] for part in mixture.parts)
    assert manifest["num_rows"] == records["num_rows"] + text["num_rows"]
    assert [part["sha256"] for part in manifest["parts"]] == [records["sha256"], text["sha256"]]


@pytest.mark.parametrize("shares", [[(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)], [(0, 3), (1, 2)]])
@pytest.mark.parametrize("start", [0, 4, 6])
def test_any_processes_from_any_step_on_make_the_same_batches(mixture, shares, start):
    whole = Batches(mixture.rows(1, BATCH)[0], batch_size=BATCH)
    split = [Batches(mixture.rows(1, BATCH)[0], batch_size=BATCH, rows=rows) for rows in shares]
    for together in zip(*(batches.iterate(start, 5) for batches in split), strict=True):
        (step,) = {step for step, _ in together}
        expected = whole.at(step)
        for rows, (_, batch) in zip(shares, together, strict=True):
            assert_same(batch, {name: x[list(rows)] for name, x in expected.items()})


def test_corpora_of_a_mixture_are_shuffled_apart(mixture):
    """Each of its corpora has its own seed, nested ones too."""
    text = mixture.parts[1]
    twice = MixtureConfig(parts=(text, text, text), seq_len=SEQ_LEN)
    rows, manifest = twice.rows(1)
    count = manifest["num_rows"]
    passes = [[rows[i]["tokens"].tobytes() for i in range(part, count, 3)] for part in range(3)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_all_parts_with_a_validation_split_are_evaluated(mixture):
    assert len(mixture.open("validation")) == 3
    records, text = mixture.parts
    without = text.replace(corpus=text.corpus.replace(validation_percent=0))
    assert len(mixture.replace(parts=(records, without)).open("validation")) == 2
    with pytest.raises(DataError, match=r"the validation split of .*c\.text is empty"):
        mixture.replace(parts=(without, without)).open("validation")
    damaged = text.replace(corpus=text.corpus.replace(path="nowhere"))
    with pytest.raises(DataError, match="no file or folder at nowhere"):
        mixture.replace(parts=(records, damaged)).open("validation")


def test_a_run_keeps_a_mixture_as_json(mixture):
    assert text_data(mixture.to_dict()) == mixture
    assert mixture.tokenizer == TokenizerConfig()
    assert mixture.vocab_size == 258


def test_parts_of_two_tokenizers_are_refused(mixture, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    text = mixture.parts[1].replace(tokenizer=TokenizerConfig(kind="json", path=str(path)))
    message = r"tokenizers of MixtureConfig\.parts differ \(byte and .*tokenizer\.json\)"
    for use in (lambda x: x.vocab_size, lambda x: x.open("validation"), lambda x: x.rows(0)):
        with pytest.raises(DataError, match=message):
            use(mixture.replace(parts=(mixture.parts[0], text)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ((0, (1, 1)), (0, (1, 2)))}, r"begin at steps \[0, 0\]: put them in ascending"),
        ({"stages": ((0, (1, 1)), (9, (1, 1)), (4, (1, 1)))}, r"\[0, 9, 4\]"),
        ({"stages": ((0, (1, 1, 1)),)}, r"stages \(1, 1, 1\) are 3 numbers for 2 parts; give"),
        ({"stages": ((0, ()),)}, r"stages \(\) are 0 numbers for 2 parts"),
        ({"stages": ((0, (0, 0)),)}, r"stages \(0, 0\) are all 0, or more"),
        (
            {"weights": (1e-308, 1e308)},
            r"weights \(1e-308, 1e\+308\) are all 0, or more than 10\^9",
        ),
        ({"weights": (1, 10**400)}, r"must each be below 2\^63"),
        ({"stages": ((0, (1, -1)),)}, r"stages .* must each be 0 or more, finite"),
        (
            {"stages": ((0, 1, 1),)},
            r"must be tuple\[tuple\[int, tuple\[float, \.\.\.\]\], \.\.\.\]",
        ),
        ({"stages": ((0.5, (1, 1)),)}, r"stages must be tuple"),
        ({"weights": (1,), "stages": ()}, r"weights \(1,\) are 1 numbers for 2 parts"),
        ({"seq_len": 8}, r"seq_len 8 and those of its parts, \[16, 16\], differ"),
        ({"parts": ()}, r"parts \(\) must be one or more"),
    ],
)
def test_config_errors(mixture, changes, message):
    with pytest.raises(UserError, match=message):
        mixture.replace(**changes)


def test_stages_of_a_part_are_refused(mixture):
    records = mixture.parts[0].replace(weights=(), stages=((0, (1, 1)), (3, (2, 1))))
    assert len(records.rows(0, BATCH)[0][12]["tokens"]) == SEQ_LEN
    with pytest.raises(UserError, match="a part of MixtureConfig has stages: bind"):
        mixture.replace(parts=(records, mixture.parts[1]))
