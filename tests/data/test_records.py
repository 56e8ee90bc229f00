import contextlib
import hashlib
import json
import os
import shutil

import corpora
import numpy as np
import pytest
from checks import assert_same
from damage import flip_bit

from ttcd_jax.data.mixture import RecordsConfig
from ttcd_jax.data.packing import DocumentRows
from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.records import (
    open_records,
    read_manifest,
    records_tokenizer,
    sealed,
    verify_records,
)
from ttcd_jax.data.sources import TextConfig
from ttcd_jax.data.tokenizer import ByteTokenizer, TokenizerConfig
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import sha256

BYTES = TokenizerConfig()
SEQ_LEN = 32
SHARD_TOKENS = 400
HUGE = "größe 日本 🧮\n" * 100  # longer than a shard, and than a row


def _prepared(texts, folder):
    """All of the texts, to train on."""
    corpus = corpora.text_folder(folder.with_suffix(".text"), texts, validation_percent=0)
    return corpora.records(corpus, folder, shard_tokens=SHARD_TOKENS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    texts = {f"{i:03}": chr(97 + i % 26) * (1 + 7 * i % 90) for i in range(100)}
    texts |= {"050": HUGE, "060": "", "061": "\x00"}
    folder = tmp_path_factory.mktemp("corpus") / "text"
    return corpora.text_folder(folder, texts, validation_percent=20)


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "records"
    corpora.records(corpus, folder, shard_tokens=SHARD_TOKENS)
    return folder


def _config(*folders, **options):
    return RecordsConfig(paths=tuple(map(str, folders)), seq_len=SEQ_LEN, **options)


def _batches(config):
    return Batches(config.rows(3)[0], batch_size=4)


def _assert_equal(a, b):
    assert_same(a, b)
    assert [x.dtype for x in a.values()] == [x.dtype for x in b.values()]


def test_batches_are_those_of_the_text(corpus, folder):
    text = TextConfig(corpus=corpus, tokenizer=BYTES, seq_len=SEQ_LEN)
    records = _config(folder)
    assert records.vocab_size == text.vocab_size
    ours, theirs = _batches(records), _batches(text)
    num_rows = text.rows(3)[1]["num_rows"]
    assert records.rows(3)[1]["num_rows"] == num_rows
    for step in (*range(8), num_rows, 10**6):  # far beyond one pass over the corpus
        _assert_equal(ours.at(step), theirs.at(step))


def test_held_out_documents_are_those_of_the_text(corpus, folder):
    text = TextConfig(corpus=corpus, tokenizer=BYTES, seq_len=SEQ_LEN)
    records = _config(folder, folder)
    (expected,) = text.open("validation")
    for actual in records.open("validation"):
        ours, theirs = (DocumentRows(r, seq_len=SEQ_LEN) for r in (actual, expected))
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs, strict=True):
            _assert_equal(a, b)


def test_documents_lie_whole_in_shards(folder):
    facts = verify_records(folder)["splits"]["train"]
    records = open_records(folder, "train")
    assert len(facts["shards"]) == len(records.shards) > 3
    sizes = [shard.size for shard in records.shards]
    huge = len(HUGE.encode()) + 2
    assert max(sizes) == huge > SHARD_TOKENS
    assert sum(size > SHARD_TOKENS for size in sizes) == 1
    assert set(np.cumsum(sizes)) <= set(records.starts.tolist())
    assert records.shards[0].dtype == np.uint16
    for document, size in enumerate(records.sizes):
        ids = records.read(document, 0, size)
        assert (ids[0], ids[-1]) == (ByteTokenizer.bos_id, ByteTokenizer.eos_id)
        assert (ids[1:-1] < 256).all()


@pytest.mark.parametrize("num_bytes", [1, 500])
def test_a_batch_of_documents_ends_no_shard(corpus, folder, tmp_path, monkeypatch, num_bytes):
    """The files do not depend on the batches in which documents reach the tokenizer."""
    monkeypatch.setattr("ttcd_jax.data.preparation._BATCH_BYTES", num_bytes)
    manifest = corpora.records(corpus, tmp_path / "records", shard_tokens=SHARD_TOKENS)
    assert manifest == read_manifest(folder)


def test_large_vocabularies_take_four_bytes(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 2**16 + 1)
    monkeypatch.setattr(ByteTokenizer, "eos_id", 2**16)
    manifest = corpora.records(corpus, tmp_path / "records")
    records = open_records(tmp_path / "records", "train")
    assert manifest["dtype"] == "uint32"
    assert records.read(0, 0, int(records.sizes[0]))[-1] == 2**16


def test_the_manifest_tells_text_and_tokenizer(corpus, folder):
    manifest = read_manifest(folder)
    _, of_text = TextConfig(corpus=corpus, tokenizer=BYTES, seq_len=SEQ_LEN).rows(0)
    text = manifest["splits"]["train"]["text"]
    assert text == {name: of_text[name] for name in text}
    assert manifest["splits"]["train"]["num_documents"] == text["num_documents"]
    assert records_tokenizer(folder) == BYTES
    for name, facts in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert facts == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def two_folders(tmp_path):
    """A folder that holds records a, of one document, and b, of four."""
    for name, count, length in (("a", 1, 3000), ("b", 4, 98)):
        _prepared([name * length] * count, tmp_path / "both" / name)
    return RecordsConfig(paths=str(tmp_path / "both"), folders=("a", "b"), seq_len=SEQ_LEN)


def _share_of_a(config, num_drawn=310):
    rows, manifest = config.rows(seed=0)
    assert manifest["num_rows"] == 3001 // SEQ_LEN + 399 // SEQ_LEN
    return np.cumsum([ord("a") in rows[i]["tokens"] for i in range(num_drawn)])


@pytest.mark.parametrize("weights", [(8, 2), (0.5, 0.5), (1, 30)])
def test_weights_are_shares_of_rows(two_folders, weights):
    drawn = _share_of_a(two_folders.replace(weights=weights))
    share = weights[0] / sum(weights)
    assert np.all(np.abs(drawn - share * np.arange(1, 311)) <= 1)


def test_weights_of_documents_count_the_tokens_of_a_mean_document(two_folders):
    config = two_folders.replace(weights=(1, 30), weights_per="document")
    assert abs(_share_of_a(config)[-1] / 310 - 3002 / (3002 + 30 * 100)) < 0.01


def test_a_folder_of_records_is_read_alone(two_folders):
    assert two_folders.replace(paths=(two_folders.paths,)).located() == two_folders.located()
    alone = two_folders.replace(paths=f"{two_folders.paths}/a", weights=(8, 2))
    _, manifest = alone.rows(seed=0)
    assert manifest["num_rows"] == 3001 // SEQ_LEN
    assert len(manifest["sha256"]) == 1
    with pytest.raises(DataError, match="both/c holds no token records"):
        two_folders.replace(folders=("a", "c")).manifests()


def test_a_folder_is_passed_over_before_a_row_of_it_comes_again(tmp_path, folder):
    _prepared(["".join(map(str, range(300)))], tmp_path / "records")
    config = _config(folder, tmp_path / "records")
    num_rows = 791 // SEQ_LEN

    def drawn(seed, start):
        """Rows of the second folder, from index `start` on."""
        rows, manifest = config.rows(seed)
        found = (rows[start + i]["tokens"] for i in range(2 * manifest["num_rows"]))
        return [t.tobytes() for t in found if ((t >= 48) & (t < 58)).sum() > 20][:num_rows]

    first = drawn(5, 0)
    assert len(set(first)) == num_rows
    assert drawn(5, 10**8) == drawn(5, 10**8) != first
    assert drawn(6, 0) != first


@pytest.fixture
def copy(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_data_of_a_run_are_pinned_by_the_digest(copy, corpus):
    config = _config(copy)
    before = config.rows(0)[1]
    shutil.rmtree(copy)
    corpora.records(corpus, copy, shard_tokens=SHARD_TOKENS)
    assert config.rows(0)[1] == before
    shutil.rmtree(copy)
    _prepared(["something else " * 9], copy)
    assert config.rows(0)[1] != before


TOKENS = "train.00000.tokens.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 8), r"\d+ bytes instead of \d+"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: flip_bit(path, 16), "its content changed"),  # one start, or one token
    ],
)
@pytest.mark.parametrize("name", [TOKENS, "train.00003.tokens.bin", "train.starts.bin"])
def test_a_changed_file_is_named_before_training(copy, name, change, message):
    change(copy / name)
    with contextlib.suppress(FileNotFoundError):
        os.utime(copy / name, ns=(0, 0))
    for read in (lambda: _config(copy).rows(0), lambda: verify_records(copy)):
        for _ in range(2):
            with pytest.raises(DataError, match=rf"copy/{name}: {message}; copy it again"):
                read()
    open_records(copy, "validation").read(0, 0, 1)


def test_a_shard_that_is_cut_under_a_reader_is_an_error(copy):
    records = open_records(copy, "train")
    last = len(records) - 1
    path = max(copy.glob("train.*.tokens.bin"))
    ids = records.read(last, 0, 2).tolist()
    os.truncate(path, 2)
    with pytest.raises(DataError, match=rf"{path} was cut to 2 of \d+ bytes; copy it again"):
        records.read(last, 0, 2)
    records.read(0, 0, 2)
    for file in copy.iterdir():  # the others are mapped
        file.unlink()
    assert records.read(0, 0, 1) == ids[:1]


def test_a_token_outside_the_vocabulary_is_an_error_where_it_is_read(copy):
    ids = np.fromfile(copy / TOKENS, "<u2")
    ids[open_records(copy, "train").starts[1] + 1] = 258
    ids.tofile(copy / TOKENS)
    files = read_manifest(copy)["files"]
    files[TOKENS]["sha256"] = sha256(copy / TOKENS)
    _reseal(copy, files=files)
    records = open_records(copy, "train")
    assert records.read(1, 0, 1) == ByteTokenizer.bos_id
    message = r"copy \(train\), document 1: token 258 is outside the vocabulary of 258"
    with pytest.raises(DataError, match=message):
        records.read(1, 1, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda starts: starts[::-1],
        lambda starts: starts + np.uint64(1),
        lambda starts: np.concatenate([starts[:1], starts[2:3], starts[1:2], starts[3:]]),
        lambda starts: np.concatenate([starts[:3], starts[3:-1] - np.uint64(1), starts[-1:]]),
    ],
)
def test_starts_that_do_not_fit_are_refused(copy, change):
    starts = np.fromfile(copy / "train.starts.bin", "<u8")
    change(starts).tofile(copy / "train.starts.bin")
    with pytest.raises(DataError, match=r"train\.starts\.bin does not fit its shards"):
        open_records(copy, "train", verifies=False)


def _reseal(folder, **changes):
    """Writes the manifest with `changes`, as if it were hostile: its own digest fits."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"vocab_size": 258', '"vocab_size": 999', r"manifest\.json was changed"),
        ("}\n", "", r"manifest\.json is not JSON"),
    ],
)
def test_a_damaged_manifest_is_refused(copy, old, new, message):
    path = copy / "manifest.json"
    path.write_text(new.join(path.read_text().rsplit(old, 1)))
    with pytest.raises(DataError, match=message):
        read_manifest(copy)
    path.unlink()
    with pytest.raises(DataError, match="holds no token records"):
        read_manifest(copy)


def test_a_manifest_of_another_format_is_refused(copy):
    _assert_hostile(copy, "describes no 'ttcd_jax token records 1'", format="of tomorrow")


@pytest.mark.parametrize(
    "name", ["../x.bin", "/etc/passwd", "", "..", "sub/x.bin", "a\x1b.bin", "absent"]
)
def test_a_manifest_that_leaves_its_folder_is_refused(copy, name):
    (copy.parent / "x.bin").write_bytes((copy / TOKENS).read_bytes())
    manifest = read_manifest(copy)
    manifest["splits"]["train"]["shards"][0] = name
    if name != "absent":
        manifest["files"][name] = manifest["files"][TOKENS]
    _assert_hostile(copy, "describes no files of its folder", **manifest)


@pytest.mark.parametrize("dtype", ["uint32", "u4", 3])
def test_a_manifest_of_other_ids_than_its_vocabulary_has_is_refused(copy, dtype):
    _assert_hostile(copy, "describes no files of its folder", dtype=dtype)


def _assert_hostile(folder, message, **changes):
    _reseal(folder, **changes)
    for read in (read_manifest, verify_records):
        with pytest.raises(DataError, match=rf"manifest\.json {message}"):
            read(folder)


def test_folders_of_two_tokenizers_do_not_mix(copy, folder):
    _reseal(copy, tokenizer="ab12")
    config = _config(folder, copy)
    with pytest.raises(DataError, match=r"copy was made by another tokenizer \(tokenizer ab12\)"):
        config.open("train")
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"copy/tokenizer\.json: its content changed"):
        records_tokenizer(copy)


def test_a_split_that_is_not_there(tmp_path, folder):
    _prepared(["abc " * 99], tmp_path / "records")
    config = _config(tmp_path / "records")
    with pytest.raises(DataError, match="has no validation split: prepare it with"):
        config.open("validation")
    assert len(config.replace(paths=(*config.paths, str(folder))).open("validation")) == 1
    with pytest.raises(DataError, match=r"records \(train\) has 398 tokens and a row takes 1001"):
        config.replace(seq_len=1000).rows(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"paths": ()}, "names no folder"),
        ({"paths": ("x", "y"), "folders": ("a",)}, r"folders \('a',\) are names below one path"),
        ({"paths": ("x",), "weights": (1.0, 2.0)}, r"\(1\.0, 2\.0\) are 2 numbers for 1 folders"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(UserError, match=message):
        RecordsConfig(**fields, seq_len=8)
