"""The data of runs: mixtures of corpora, their stages by step, and what a run was trained on."""

import functools
import hashlib
import json
import shutil

import corpora
import numpy as np
import pytest
from checks import assert_same, refused

from ttcd_jax.data import sources
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.sources import MixedRows, MixtureConfig, RecordsConfig, TextConfig
from ttcd_jax.data.tokenizer import TokenizerConfig, build_tokenizer, train_tokenizer
from ttcd_jax.errors import DataError

BATCH = 4
SEQ_LEN = 16
BYTES = TokenizerConfig()


def _corpus(seed, num_documents, mean):
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *(2 + rng.geometric(1 / mean, num_documents))])
    ids = rng.integers(2, 250, starts[-1]).astype(np.uint16)
    return TokenRecords([ids], starts, eos_id=1)


@pytest.mark.parametrize(
    ("weights", "digest"), [(None, "e79ed513b1d2dcc9"), ((8, 2, 0.7), "b60e9288240308a7")]
)
def test_the_order_is_that_of_every_run_so_far(weights, digest):
    """Digests from grain's `MapDataset.mix`, which mixed the rows at first."""
    data = RecordsConfig(paths="x", seq_len=SEQ_LEN)
    sizes = [(40, 50), (60, 9), (5, 300)]
    parts = [sources.corpus_rows(_corpus(i, *sizes[i]), data, 3, 3 + i) for i in range(3)]
    weights = weights or [size for _, size in parts]
    rows = MixedRows([rows for rows, _ in parts], [(0, weights)])
    found = hashlib.sha256()
    for index in (*range(500), *range(10**6, 10**6 + 100), 2**31 - 2):
        row = rows[index]
        for name in sorted(row):
            found.update(row[name].tobytes())
    assert found.hexdigest()[:16] == digest


STAGES = [(0, (8, 2, 0)), (103, (5, 0, 5)), (104, (1, 1, 1)), (1000, (0, 0, 2)), (1007, (3, 1, 6))]


def test_every_part_goes_on_where_the_stage_before_left_it():
    rows = MixedRows([[(name, i) for i in range(3000)] for name in range(3)], STAGES)
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
    records = RecordsConfig(paths=str(place), folders=("a", "b"), weights=(3, 1), seq_len=SEQ_LEN)
    text = TextConfig(corpus=corpus, tokenizer=BYTES, packing="best_fit", seq_len=SEQ_LEN)
    stages = ((0, (8, 2)), (5, (0, 1)), (7, (1, 1)))
    return MixtureConfig(parts=(records, text), stages=stages, seq_len=SEQ_LEN)


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
    records, text = mixture.parts
    for config in (
        MixtureConfig(parts=(text, text, text), seq_len=SEQ_LEN),
        RecordsConfig(paths=(f"{records.paths}/a",) * 3, seq_len=SEQ_LEN),
    ):
        rows, manifest = config.rows(1)
        count = manifest["num_rows"]
        passes = [[rows[i]["tokens"].tobytes() for i in range(part, count, 3)] for part in range(3)]
        assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
        assert passes[0] != passes[1] != passes[2] != passes[0]


def test_all_parts_with_a_validation_split_are_evaluated(mixture, caplog):
    assert sources.text_data(mixture.to_dict()) == mixture  # as a run keeps it
    assert (mixture.tokenizer, mixture.vocab_size) == (BYTES, 258)
    assert len(mixture.open("validation")) == 3
    records, text = mixture.parts
    without = text.replace(corpus=text.corpus.replace(validation_percent=0))
    assert not caplog.text
    assert len(mixture.replace(parts=(records, without)).open("validation")) == 2
    assert "is empty" in caplog.text
    words = "the validation split of |c.text is empty"
    refused(words, mixture.replace(parts=(without, without)).open, "validation", error=DataError)
    damaged = text.replace(corpus=text.corpus.replace(path="nowhere"))
    words = "no file or folder at nowhere"
    refused(words, mixture.replace(parts=(records, damaged)).open, "validation", error=DataError)


def test_parts_of_two_tokenizers_are_refused(mixture, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    text = mixture.parts[1].replace(tokenizer=TokenizerConfig(kind="json", path=str(path)))
    other = mixture.replace(parts=(mixture.parts[0], text))
    words = "tokenizers of MixtureConfig.parts differ (byte and |tokenizer.json)"
    for use in (lambda: other.vocab_size, lambda: other.open("validation"), lambda: other.rows(0)):
        refused(words, use, error=DataError)


def test_parts_whose_documents_begin_and_end_otherwise_are_refused(mixture, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(["a text"], 258))

    def use(**ids):
        tokenizers = (TokenizerConfig(kind="json", path=str(path), **x) for x in (ids, {}))
        parts = [mixture.parts[1].replace(tokenizer=x) for x in tokenizers]
        return mixture.replace(parts=tuple(parts)).vocab_size

    assert use(bos_id=0, eos_id=1) == use() == 258
    words = f"parts differ ({path} and {path})|set TokenizerConfig.bos_id and eos_id of the text"
    refused(words, use, bos_id=1, error=DataError)


ONE = TextConfig(corpus=CorpusConfig(), tokenizer=BYTES, seq_len=SEQ_LEN)
MIXED = functools.partial(MixtureConfig, parts=(ONE, ONE), seq_len=SEQ_LEN)
RECORDS = functools.partial(RecordsConfig, paths="x", seq_len=SEQ_LEN)
STAGED = RecordsConfig(paths="x", folders=("a", "b"), stages=((3, (2, 1)),), seq_len=SEQ_LEN)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (MIXED, {"stages": ((0, (1, 1)), (0, (1, 2)))}, "begin at steps [0, 0]: put them"),
        (MIXED, {"stages": ((0, (1, 1, 1)),)}, "stages (1, 1, 1) are 3 numbers for 2 parts; give"),
        (MIXED, {"stages": ((0, ()),)}, "stages () are 0 numbers for 2 parts"),
        (MIXED, {"stages": ((0, (0, 0)),)}, "stages (0, 0) are all 0, or more"),
        (MIXED, {"weights": (1e-308, 1e308)}, "(1e-308, 1e+308) are all 0, or more than 10^9"),
        (MIXED, {"weights": (1,), "stages": ()}, "weights (1,) are 1 numbers for 2 parts"),
        (MIXED, {"seq_len": 8}, "seq_len 8 and those of its parts, [16, 16], differ"),
        (MIXED, {"parts": ()}, "parts () must be one or more"),
        (MIXED, {"parts": (STAGED, STAGED)}, "a part of MixtureConfig has stages: bind"),
        (RECORDS, {"paths": ()}, "paths () must be one or more"),
        (RECORDS, {"paths": ("x", "y"), "folders": ("a",)}, "folders ('a',) are names below one"),
        (RECORDS, {"weights": (1.0, 2.0)}, "(1.0, 2.0) are 2 numbers for 1 folders"),
        (CorpusConfig, {"kind": "text"}, "kind 'text' takes the path"),
        (CorpusConfig, {"path": "x"}, "kind 'stdlib' takes none"),
        (CorpusConfig, {"validation_files": 2}, "validation_files 2 is for files of yours"),
        (CorpusConfig, {"field": "body"}, "field 'body' is for files of yours"),
        (CorpusConfig, {"validation_percent": 100}, "100 must be between 0 and 99"),
        (CorpusConfig, {"glob": "/etc/*"}, "glob /etc/* must be a pattern below path, such as"),
        (CorpusConfig, {"glob": "a/../../*"}, "must be a pattern below path"),
        (CorpusConfig, {"glob": "**x"}, "must be a pattern below path"),
        (TokenizerConfig, {"kind": "json"}, "kind 'json' takes the path"),
        (TokenizerConfig, {"path": "x.json"}, "kind 'byte' takes none"),
        (TokenizerConfig, {"stop_ids": (3,)}, "set no bos_id, eos_id, stop_ids or adds_bos"),
    ],
)
def test_what_a_configuration_may_not_say(kind, fields, words):
    refused(words, kind, **fields)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_changed_text_is_refused_with_the_option_that_gives_another(tmp_path, is_mixed):
    folder = tmp_path / "text"
    texts = [f"The text of file {number}.\n" for number in range(40)]
    corpus = corpora.text_folder(folder, texts, validation_files=2)
    data = TextConfig(corpus=corpus, tokenizer=BYTES, seq_len=8)
    data = MixtureConfig(parts=(data, data), seq_len=8) if is_mixed else data
    (tmp_path / "data.json").write_text(json.dumps(data.rows(0)[1]))

    def read(text=None):
        arguments = (tmp_path, data.to_dict(), build_tokenizer(BYTES), text, "background")
        return sum(map(len, sources.text_records(*arguments)))

    def assert_refused(message):
        with pytest.raises(DataError, match=message) as caught:
            read()
        assert caught.value.__notes__ == ["--background=PATH gives another text"]

    assert read() == (4 if is_mixed else 2)
    (folder / "01.txt").write_text("The text of file one.\n")
    assert_refused(r"data changed since .* was started")
    assert read(str(folder)) == 40
    corpora.text_folder(tmp_path / "two", {"train/a.txt": "a", "validation/b.txt": "b"})
    words = "two has splits: name one, --background=|two/validation"
    refused(words, read, f"{tmp_path}/two")
    assert read(f"{tmp_path}/two/validation") == 1
    (tmp_path / "data.json").unlink()  # of a run that was not trained on text of its own
    assert read() == (4 if is_mixed else 2)
    shutil.rmtree(folder)
    assert_refused(f"no file or folder at {folder}: give the path")


def test_a_run_on_batches_of_its_caller_has_no_text():
    data = sources.BatchesConfig(seq_len=8).to_dict()
    words = "x was trained on batches of its caller, |evaluate_every None"
    refused(words, sources.text_records, "x", data, None, None)
