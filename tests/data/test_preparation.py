"""Records that several calls make: each begins where the last one was killed."""

import json
import re
import signal
import tracemalloc
from pathlib import Path

import commands
import numpy as np
import pytest

from ttcd_jax.data import preparation
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.documents import Document
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.preparation import prepare_records
from ttcd_jax.data.records import read_manifest, verify_records
from ttcd_jax.data.tokenizer import ByteTokenizer, TokenizerConfig
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import whole_folder

NUM_DOCUMENTS = 60
# Killed before the n-th write, flush or new name of a file; a write is cut in the middle.
PROGRAM = """
import os, signal, sys
from pathlib import Path

import numpy as np

from ttcd_jax.data import preparation
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.files import whole_folder

def main(source, output, killed_at, num_processes):
    events, encode, append = [], preparation.encode_documents, preparation._append
    tokenized = []

    def event(call, half=lambda *arguments: None):
        def wrapped(*arguments):
            events.append(call)
            if len(events) == killed_at:
                half(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)
        return wrapped

    def encode_counted(documents, tokenizer):
        tokenized.extend(documents)
        return encode(documents, tokenizer)

    os.fsync, Path.replace = event(os.fsync), event(Path.replace)
    half = lambda path, values: append(path, values[: len(values) // 2])
    preparation._append = event(append, half)
    preparation.encode_documents = encode_counted
    preparation._BATCH_BYTES = 100
    corpus = CorpusConfig(kind="text", path=source, validation_percent=30)
    with whole_folder(Path(output), preparation.stored_tokens) as folder:
        preparation.prepare_records(
            corpus, TokenizerConfig(), folder, shard_tokens=200, num_processes=num_processes
        )
    print(len(tokenized), len(events))

if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "prepare.py"
    path.write_text(PROGRAM)
    return path


def _write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


TEXTS = [chr(97 + i % 26) * (i % 37 + 1) for i in range(NUM_DOCUMENTS)]


@pytest.fixture
def source(tmp_path):
    _write(tmp_path / "corpus.jsonl", TEXTS)
    return tmp_path / "corpus.jsonl"


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _prepare(source, folder):
    corpus = CorpusConfig(kind="text", path=str(source), validation_percent=30)
    folder.mkdir()
    prepare_records(corpus, TokenizerConfig(), folder, shard_tokens=200)
    return _files(folder)


def _unfinished(output):
    return output.with_name(f".{output.name}.unfinished")


def _stored_documents(output):
    try:
        manifest = json.loads((_unfinished(output) / "manifest.json").read_text())
    except FileNotFoundError:
        return 0
    return sum(facts["num_documents"] for facts in manifest["splits"].values())


def _killed(program, source, output, killed_at):
    result = commands.run(program, source, output, str(killed_at), "1")
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not output.exists()


@pytest.mark.parametrize(("killed_at", "processes"), [*((n, 1) for n in range(2, 65, 5)), (40, 2)])
def test_a_killed_call_is_continued(program, source, tmp_path, killed_at, processes):
    output = tmp_path / "records"
    _killed(program, source, output, killed_at)
    stored = _stored_documents(output)
    result = commands.run(program, source, output, "0", str(processes))
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    if processes == 1:
        assert int(result.stdout.split()[0]) == NUM_DOCUMENTS - stored
    assert (stored > 0) == (killed_at > 10), stored
    assert _files(output) == _prepare(source, tmp_path / "undisturbed")
    verify_records(output)
    assert not _unfinished(output).exists()


def test_calls_that_are_killed_one_after_another_come_to_an_end(program, source, tmp_path):
    output, num_killed = tmp_path / "records", 0
    while not output.exists():
        result = commands.run(program, source, output, "25", "1")
        num_killed += result.returncode == -signal.SIGKILL
        assert num_killed < 20
    assert num_killed > 2
    assert _files(output) == _prepare(source, tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("texts", "num_tokenized"),
    [(["x", *TEXTS[1:]], None), (TEXTS[:5], None), ([*TEXTS, *"abc"], NUM_DOCUMENTS + 3)],
)
def test_only_text_that_did_not_change_is_continued(
    program, source, tmp_path, texts, num_tokenized
):
    output = tmp_path / "records"
    _killed(program, source, output, 40)
    stored = _stored_documents(output)
    _write(source, texts)
    result = commands.run(program, source, output, "0", "1")
    if num_tokenized is None:
        change = "documents of (train|validation)"
        assert re.search(rf"cannot be continued, .*{change}\): restore it, or begin", result.stderr)
        assert _stored_documents(output) >= stored
    else:
        assert int(result.stdout.split()[0]) == num_tokenized - stored
        assert _files(output) == _prepare(source, tmp_path / "undisturbed")


def test_damage_is_not_continued(program, source, tmp_path):
    output = tmp_path / "records"
    _killed(program, source, output, 40)
    shard = _unfinished(output) / "train.00000.tokens.bin"
    ids = np.fromfile(shard, "<u2")
    ids[3] ^= 1
    ids.tofile(shard)
    result = commands.run(program, source, output, "0", "1")
    assert "train.00000.tokens.bin: its content changed" in result.stderr


def test_other_arguments_are_refused(program, source, tmp_path):
    output = tmp_path / "records"
    _killed(program, source, output, 40)
    corpus = CorpusConfig(kind="text", path=str(source), validation_percent=20)
    folder = _unfinished(output)
    before = _files(folder)
    with pytest.raises(DataError, match=r"corpus.validation_percent: 30 -> 20\): restore it"):
        prepare_records(corpus, TokenizerConfig(), folder, shard_tokens=200)
    assert _files(folder) == before


def test_a_complete_folder_that_was_not_renamed_is_continued(source, tmp_path):
    folder = tmp_path / "records"
    files = _prepare(source, folder)
    corpus = CorpusConfig(kind="text", path=str(source), validation_percent=30)
    prepare_records(corpus, TokenizerConfig(), folder, shard_tokens=200)
    assert _files(folder) == files
    assert read_manifest(folder)["splits"]["train"]["num_documents"] > 0


def test_one_process_at_a_time_fills_a_folder(tmp_path):
    output = tmp_path / "records"
    with whole_folder(output) as folder:
        (folder / "x").write_text("mine")
        busy = pytest.raises(UserError, match="is being written by another process")
        with busy, whole_folder(output):
            pass
        assert (folder / "x").exists()
    assert _files(output) == {"x": b"mine"}


def test_a_full_disk_is_the_reason():
    with pytest.raises(OSError, match="No space left on device"):
        preparation._append(Path("/dev/full"), np.zeros(10**6, np.uint16))


def test_a_long_document_takes_its_text_and_its_tokens(monkeypatch):
    document = Document("long", b"x" * 2**22)
    tracemalloc.start()
    try:
        records = encode_documents([document], ByteTokenizer())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert records.starts.tolist() == [0, 2**22 + 2]
    assert peak < 2.5 * 2 * 2**22
