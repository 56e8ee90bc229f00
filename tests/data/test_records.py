"""Folders of token records: their rows are those of the text, and what differs is refused; several
calls make them, each from where the last one was killed."""

import hashlib
import json
import os
import shutil
import signal
import sys
import tracemalloc
from pathlib import Path

import commands
import corpora
import numpy as np
import pytest
from checks import assert_same, refused
from damage import flip_bit

from ttcd_jax.data import records as module
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.documents import Document
from ttcd_jax.data.packing import DocumentRows, encode_documents
from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.records import (
    open_records,
    prepare_records,
    read_manifest,
    records_tokenizer,
    verify_records,
)
from ttcd_jax.data.sources import RecordsConfig, TextConfig
from ttcd_jax.data.tokenizer import ByteTokenizer, TokenizerConfig
from ttcd_jax.errors import DataError
from ttcd_jax.files import whole_folder

BYTES = TokenizerConfig()
SEQ_LEN = 32
SHARD_TOKENS = 400
HUGE = "größe 日本 🧮\n" * 100  # longer than a shard, and than a row
TOKENS, STARTS = "train.00000.tokens.bin", "train.starts.bin"


def _prepared(texts, folder):
    """All of the texts, to train on."""
    corpus = corpora.text_folder(folder.with_suffix(".text"), texts, validation_percent=0)
    return corpora.records(corpus, folder, shard_tokens=SHARD_TOKENS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    texts = {f"{i:03}.txt": chr(97 + i % 26) * (1 + 7 * i % 90) for i in range(100)}
    texts |= {"050.txt": HUGE, "060.txt": "", "061.txt": "\x00"}
    folder = tmp_path_factory.mktemp("corpus") / "text"
    return corpora.text_folder(folder, texts, validation_percent=20)


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "records"
    corpora.records(corpus, folder, shard_tokens=SHARD_TOKENS)
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def _config(*folders, **options):
    return RecordsConfig(**{"paths": tuple(map(str, folders)), "seq_len": SEQ_LEN} | options)


def test_rows_and_manifest_are_those_of_the_text(corpus, folder):
    text, records = TextConfig(corpus=corpus, tokenizer=BYTES, seq_len=SEQ_LEN), _config(folder)
    (ours, its), (theirs, of_text) = records.rows(3), text.rows(3)
    assert (records.vocab_size, its["num_rows"]) == (text.vocab_size, of_text["num_rows"])
    ours, theirs = (Batches(rows, batch_size=4) for rows in (ours, theirs))
    for step in (*range(8), of_text["num_rows"], 10**6):  # far beyond one pass over the corpus
        assert_same(ours.at(step), theirs.at(step), strict=True)
    entry = read_manifest(folder)["splits"]["train"]
    assert entry["text"] == {name: of_text[name] for name in entry["text"]}
    assert entry["num_documents"] == of_text["num_documents"]
    assert records_tokenizer(folder) == BYTES
    (expected,) = text.open("validation")
    for actual in _config(folder, folder).open("validation"):
        ours, theirs = (DocumentRows(r, seq_len=SEQ_LEN) for r in (actual, expected))
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b, strict=True)


def test_documents_lie_whole_in_shards(folder):
    manifest = verify_records(folder)
    records = open_records(folder, "train")
    assert len(manifest["splits"]["train"]["shards"]) == len(records.shards) > 3
    sizes = [shard.size for shard in records.shards]
    huge = len(HUGE.encode()) + 2
    assert max(sizes) == huge > SHARD_TOKENS
    assert sum(size > SHARD_TOKENS for size in sizes) == 1
    assert set(np.cumsum(sizes)) <= set(records.starts.tolist())
    assert records.shards[0].dtype == np.uint16
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_large_vocabularies_take_four_bytes(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 2**16 + 1)
    monkeypatch.setattr(ByteTokenizer, "eos_id", 2**16)
    manifest = corpora.records(corpus, tmp_path / "records")
    records = open_records(tmp_path / "records", "train")
    assert manifest["dtype"] == "uint32"
    assert records.read(0, 0, int(records.sizes[0]))[-1] == 2**16


def test_samples_that_are_rows_stay_rows(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, (4, SEQ_LEN + 1))
    columns = {"input_ids": ("ndarray:uint32", None, list(map(corpora.mds_array, ids)))}
    corpus = corpora.text_file(corpora.mds(tmp_path, columns), field="input_ids")
    corpora.records(corpus, tmp_path / "records", samples_are_rows=True)
    rows, manifest = _config(tmp_path / "records").rows(0)
    found = [[*rows[i]["tokens"], rows[i]["targets"][-1]] for i in range(8)]
    assert sorted(found) == sorted(2 * ids.tolist())
    assert manifest["num_rows"] == 8
    words = "has a sample of 33 tokens: set seq_len to 32 or more (not 31)"
    shorter = _config(tmp_path / "records", seq_len=SEQ_LEN - 1)
    refused(words, shorter.rows, 0, error=DataError)


@pytest.fixture
def two_folders(tmp_path):
    """A folder that holds records a, of one document, and b, of four."""
    for name, count, length in (("a", 1, 3000), ("b", 4, 98)):
        _prepared([name * length] * count, tmp_path / "both" / name)
    return RecordsConfig(paths=str(tmp_path / "both"), folders=("a", "b"), seq_len=SEQ_LEN)


@pytest.mark.parametrize(
    ("share", "options"),
    [
        (0.8, {"weights": (8, 2)}),
        (3002 / (3002 + 30 * 100), {"weights": (1, 30), "weights_per": "document"}),
        (93 / 105, {}),
    ],
)
def test_weights_are_shares_of_rows_or_of_mean_documents(two_folders, share, options):
    rows, manifest = two_folders.replace(**options).rows(seed=0)
    assert manifest["num_rows"] == 3001 // SEQ_LEN + 399 // SEQ_LEN == 105
    drawn = np.cumsum([ord("a") in rows[i]["tokens"] for i in range(310)])
    assert np.all(np.abs(drawn - share * np.arange(1, 311)) <= 1.5)


def test_a_folder_of_records_is_read_alone(two_folders):
    assert two_folders.replace(paths=(two_folders.paths,)).located() == two_folders.located()
    alone = two_folders.replace(paths=f"{two_folders.paths}/a", weights=(8, 2))
    _, manifest = alone.rows(seed=0)
    assert manifest["num_rows"] == 3001 // SEQ_LEN
    assert len(manifest["sha256"]) == 1
    absent = two_folders.replace(folders=("a", "c"))
    refused("both/c holds no token records", absent.manifests, error=DataError)


def test_a_shard_that_is_cut_under_a_reader_is_an_error(copy):
    records = open_records(copy, "train")
    last = len(records) - 1
    path = max(copy.glob("train.*.tokens.bin"))
    ids = records.read(last, 0, 2).tolist()
    os.truncate(path, 2)
    words = f"{path} was cut to 2 of | bytes; copy it again"
    refused(words, records.read, last, 0, 2, error=DataError)
    records.read(0, 0, 2)
    for file in copy.iterdir():  # the others are mapped
        file.unlink()
    assert records.read(0, 0, 1) == ids[:1]


def _manifest(change):
    """A change of the manifest, whose digest fits."""

    def apply(folder):
        manifest = read_manifest(folder)
        change(manifest)
        corpora.reseal(folder, **manifest)

    return apply


def _named(name):
    def change(manifest):
        manifest["splits"]["train"]["shards"][0] = name
        if name != "absent":
            manifest["files"][name] = manifest["files"][TOKENS]

    return _manifest(change)


def _starts(change):
    """A change of the starts, whose digest fits."""

    def apply(folder):
        change(np.fromfile(folder / STARTS, "<u8")).tofile(folder / STARTS)
        corpora.reseal(folder)

    return apply


UNSEALED = '{"format": "ttcd_jax token records 1"}'
NO_FILES, NO_FIT = "manifest.json describes no files of its folder", f"{STARTS} does not fit its"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / STARTS).unlink(), f"{STARTS}: missing; copy it again"),
        (lambda x: (x / "manifest.json").write_text(UNSEALED), "manifest.json was changed"),
        (_manifest(lambda x: x.update(format="x")), "describes no 'ttcd_jax token records 1'"),
        *((_manifest(lambda x, y=y: x.update(dtype=y)), NO_FILES) for y in ("uint32", "u4", 3)),
        *((_manifest(lambda x, y=y: x.update(stop_ids=y)), NO_FILES) for y in ([-1], ["x"])),
        (_manifest(lambda x: x.update(bos_id=10**9)), NO_FILES),
        (_manifest(lambda x: x["splits"]["train"].update(num_tokens=10**18)), NO_FILES),
        (_manifest(lambda x: x["splits"]["train"].update(num_documents=10**18)), NO_FILES),
        (_manifest(lambda x: [x["files"][y].update(num_bytes=5) for y in x["files"]]), NO_FILES),
        *(
            (_named(x), NO_FILES)
            for x in ("../x.bin", "/etc/passwd", "", "..", "a\x1b.bin", "absent")
        ),
        (_starts(lambda x: x[::-1]), NO_FIT),
        (_starts(lambda x: x + np.uint64(1)), NO_FIT),
        (_starts(lambda x: x[[0, 2, 1, *range(3, x.size)]]), NO_FIT),
        (_starts(lambda x: np.r_[x[:3], x[3:-1] - np.uint64(1), x[-1:]]), NO_FIT),
    ],
)
def test_what_a_folder_may_not_say(copy, change, words):
    (copy.parent / "x.bin").write_bytes((copy / TOKENS).read_bytes())
    change(copy)
    for read in (lambda: _config(copy).rows(0), lambda: verify_records(copy)):
        refused(words, read, error=DataError)


def test_folders_of_two_tokenizers_do_not_mix(copy, folder):
    corpora.reseal(copy, tokenizer="ab12")
    words = "copy was made by another tokenizer (tokenizer ab12)"
    refused(words, _config(folder, copy).open, "train", error=DataError)
    (copy / "tokenizer.json").write_text("{}")
    words = "copy/tokenizer.json: its content changed"
    refused(words, records_tokenizer, copy, error=DataError)


def test_a_split_that_is_not_there(tmp_path, folder):
    _prepared(["abc " * 99], tmp_path / "records")
    config = _config(tmp_path / "records")
    words = "has no validation split: prepare it with"
    refused(words, config.open, "validation", error=DataError)
    assert len(config.replace(paths=(*config.paths, str(folder))).open("validation")) == 1
    words = "records (train) has 398 tokens and a row takes 1001"
    refused(words, config.replace(seq_len=1000).rows, 0, error=DataError)


TEXTS = [chr(97 + i % 26) * (i % 37 + 1) for i in range(60)]


def _write(path, texts=TEXTS):
    path.write_bytes(corpora.json_lines(texts))
    return path


@pytest.fixture
def call(tmp_path):
    """Prepares the records of `source` in a process of its own that is killed at an event."""
    _write(tmp_path / "source.jsonl")

    def run(killed_at=0, processes=1):
        paths = Path(__file__), tmp_path / "source.jsonl", tmp_path / "records"
        result = commands.run(*paths, str(killed_at), str(processes))
        if killed_at and result.returncode:
            assert result.returncode == -signal.SIGKILL, result.stderr
            assert not (tmp_path / "records").exists()
        return result

    return run


def _prepare(source, folder, validation_percent=30, **options):
    corpus = CorpusConfig(kind="text", path=str(source), validation_percent=validation_percent)
    folder.mkdir(exist_ok=True)
    prepare_records(corpus, BYTES, folder, shard_tokens=200, **options)
    return corpora.files(folder)


def _stored(place):
    """How many documents the manifest of the unfinished folder lists."""
    manifest = place / ".records.unfinished" / "manifest.json"
    splits = json.loads(manifest.read_text())["splits"] if manifest.exists() else {}
    return sum(entry["num_documents"] for entry in splits.values())


@pytest.mark.parametrize(
    ("killed_at", "processes"), [*((n, 1) for n in (2, 5, 8, *range(12, 100, 11))), (2, 2), (70, 2)]
)
def test_a_killed_call_is_continued(call, tmp_path, killed_at, processes):
    call(killed_at)
    stored = _stored(tmp_path)
    assert (stored > 0) == (killed_at > 10), stored
    result = call(processes=processes)
    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout) == (len(TEXTS) - stored if processes == 1 else 0)
    files = corpora.files(tmp_path / "records")
    assert files == _prepare(tmp_path / "source.jsonl", tmp_path / "undisturbed")
    verify_records(tmp_path / "records")
    assert not (tmp_path / ".records.unfinished").exists()
    # A complete folder that was not renamed is continued too.
    assert _prepare(tmp_path / "source.jsonl", tmp_path / "undisturbed") == files


def test_calls_that_are_killed_one_after_another_come_to_an_end(call, tmp_path):
    num_killed = 0
    while call(40).returncode:
        num_killed += 1
        assert num_killed < 20
    assert num_killed > 2
    files = _prepare(tmp_path / "source.jsonl", tmp_path / "undisturbed")
    assert corpora.files(tmp_path / "records") == files


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda source, _: _write(source, ["x", *TEXTS[1:]]), "the first | documents"),
        (lambda source, _: _write(source, TEXTS[:5]), "the first | documents"),
        (lambda source, _: _write(source, [*TEXTS, *"abc"]), None),
        (lambda _, folder: flip_bit(folder / TOKENS, 6), f"{TOKENS}: its content changed"),
        (lambda _, folder: (folder / "train.starts.bin").unlink(), "train.starts.bin: missing"),
        (lambda _, folder: (folder / "manifest.json").write_text("{"), None),
        (None, "corpus.validation_percent: 30 -> 20"),
    ],
)
def test_only_what_did_not_change_is_continued(call, tmp_path, change, words):
    call(60)
    source, folder = tmp_path / "source.jsonl", tmp_path / ".records.unfinished"
    stored, percent = _stored(tmp_path), 30 if change else 20
    if change:
        change(source, folder)
    if words is None:
        is_kept = (folder / "manifest.json").stat().st_size > 2
        num_documents = len(source.read_text().splitlines())
        assert int(call().stdout) == num_documents - stored * is_kept
        assert corpora.files(tmp_path / "records") == _prepare(source, tmp_path / "undisturbed")
    else:
        words = f"cannot be continued, |{words}|): restore it, or"
        refused(words, _prepare, source, folder, validation_percent=percent, error=DataError)
        assert _stored(tmp_path) == stored


def test_a_full_disk_is_the_reason():
    with pytest.raises(OSError, match="No space left on device"):
        module._Writer(Path("/dev"), 9)._append("full", np.zeros(10**6, np.uint16))


def test_a_long_document_takes_its_text_and_its_tokens():
    document = Document("long", b"x" * 2**22)
    tracemalloc.start()
    found = encode_documents([document], ByteTokenizer())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.starts.tolist() == [0, 2**22 + 2]
    assert peak < 2.5 * 2 * 2**22


def _main(source, output, killed_at, num_processes):
    """Killed before the n-th write, flush or new name of a file; a write is cut in the middle."""
    events, tokenized, writer = iter(range(1, 10**6)), [], module._Writer
    encode, append = module.encode_documents, writer._append

    def event(call, half=lambda *arguments: None):
        def wrapped(*arguments):
            if next(events) == killed_at:
                half(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)

        return wrapped

    os.fsync, Path.replace = event(os.fsync), event(Path.replace)
    half = lambda self, name, values: append(self, name, values[: len(values) // 2])  # noqa: E731
    writer._append = event(append, half)
    module.encode_documents = lambda x, *rest: tokenized.extend(x) or encode(x, *rest)
    module._BATCH_BYTES, module._SAVE_SECONDS = 100, 0
    with whole_folder(Path(output), module.stored_tokens) as folder:
        _prepare(source, folder, num_processes=num_processes)
    print(len(tokenized))


if __name__ == "__main__":
    _main(*sys.argv[1:3], *map(int, sys.argv[3:]))
