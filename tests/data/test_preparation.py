"""Records that several calls make: each begins where the last one was killed."""

import json
import signal
import tracemalloc
from pathlib import Path

import commands
import corpora
import numpy as np
import pytest
from checks import refused
from damage import flip_bit

from ttcd_jax.data import preparation
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.documents import Document
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.preparation import prepare_records
from ttcd_jax.data.records import verify_records
from ttcd_jax.data.tokenizer import ByteTokenizer, TokenizerConfig
from ttcd_jax.errors import DataError

# Killed before the n-th write, flush or new name of a file; a write is cut in the middle.
PROGRAM = """
import os, signal, sys
from pathlib import Path

from ttcd_jax.data import preparation
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.files import whole_folder

def main(source, output, killed_at, num_processes):
    events, tokenized, Writer = iter(range(1, 10**6)), [], preparation._Writer
    encode, append = preparation.encode_documents, Writer._append

    def event(call, half=lambda *arguments: None):
        def wrapped(*arguments):
            if next(events) == killed_at:
                half(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)
        return wrapped

    os.fsync, Path.replace = event(os.fsync), event(Path.replace)
    half = lambda self, name, values: append(self, name, values[: len(values) // 2])
    Writer._append = event(append, half)
    preparation.encode_documents = lambda x, *rest: tokenized.extend(x) or encode(x, *rest)
    preparation._BATCH_BYTES, preparation._SAVE_SECONDS = 100, 0
    corpus = CorpusConfig(kind="text", path=source, validation_percent=30)
    options = {"shard_tokens": 200, "num_processes": num_processes}
    with whole_folder(Path(output), preparation.stored_tokens) as folder:
        preparation.prepare_records(corpus, TokenizerConfig(), folder, **options)
    print(len(tokenized))

if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
"""


TEXTS = [chr(97 + i % 26) * (i % 37 + 1) for i in range(60)]


def _write(path, texts=TEXTS):
    path.write_bytes(corpora.json_lines(texts))
    return path


@pytest.fixture
def call(tmp_path):
    """Prepares the records of `source` in a process of its own that is killed at an event."""
    _write(tmp_path / "source.jsonl")
    (tmp_path / "prepare.py").write_text(PROGRAM)

    def run(killed_at=0, processes=1):
        paths = (tmp_path / name for name in ("prepare.py", "source.jsonl", "records"))
        result = commands.run(*paths, str(killed_at), str(processes))
        if killed_at and result.returncode:
            assert result.returncode == -signal.SIGKILL, result.stderr
            assert not (tmp_path / "records").exists()
        return result

    return run


def _prepare(source, folder, validation_percent=30):
    corpus = CorpusConfig(kind="text", path=str(source), validation_percent=validation_percent)
    folder.mkdir(exist_ok=True)
    prepare_records(corpus, TokenizerConfig(), folder, shard_tokens=200)
    return corpora.files(folder)


def _stored(place):
    """How many documents the manifest of the unfinished folder lists."""
    manifest = place / ".records.unfinished" / "manifest.json"
    splits = json.loads(manifest.read_text())["splits"] if manifest.exists() else {}
    return sum(entry["num_documents"] for entry in splits.values())


@pytest.mark.parametrize(
    ("killed_at", "processes"),
    [*((n, 1) for n in (2, 5, 8, *range(12, 100, 11))), (2, 2), (70, 2)],
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


TOKENS = "train.00000.tokens.bin"


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
        preparation._Writer(Path("/dev"), 9)._append("full", np.zeros(10**6, np.uint16))


def test_a_long_document_takes_its_text_and_its_tokens():
    document = Document("long", b"x" * 2**22)
    tracemalloc.start()
    records = encode_documents([document], ByteTokenizer())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert records.starts.tolist() == [0, 2**22 + 2]
    assert peak < 2.5 * 2 * 2**22
