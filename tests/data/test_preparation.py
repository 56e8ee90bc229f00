"""Records that several calls make: each begins where the last one was killed."""

import json
import re
import signal
import tracemalloc
from pathlib import Path

import commands
import corpora
import numpy as np
import pytest
from damage import flip_bit

from ttcd_jax.data import preparation
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.documents import Document
from ttcd_jax.data.packing import encode_documents
from ttcd_jax.data.preparation import prepare_records
from ttcd_jax.data.records import verify_records
from ttcd_jax.data.tokenizer import ByteTokenizer, TokenizerConfig
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import whole_folder

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
    events, tokenized, Writer = [], [], preparation._Writer
    encode, append = preparation.encode_documents, Writer._append

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
    half = lambda self, name, values: append(self, name, values[: len(values) // 2])
    Writer._append = event(append, half)
    preparation.encode_documents = encode_counted
    preparation._BATCH_BYTES, preparation._SAVE_SECONDS = 100, 0
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


TEXTS = [chr(97 + i % 26) * (i % 37 + 1) for i in range(60)]


def _write(path, texts=TEXTS):
    path.write_bytes(corpora.json_lines(texts))
    return path


@pytest.fixture
def source(tmp_path):
    return _write(tmp_path / "corpus.jsonl")


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _prepare(source, folder, validation_percent=30):
    corpus = CorpusConfig(kind="text", path=str(source), validation_percent=validation_percent)
    folder.mkdir(exist_ok=True)
    prepare_records(corpus, TokenizerConfig(), folder, shard_tokens=200)
    return _files(folder)


def _stored(output):
    """The unfinished folder, and how many documents its manifest lists."""
    folder = output.with_name(f".{output.name}.unfinished")
    if not (folder / "manifest.json").exists():
        return folder, 0
    splits = json.loads((folder / "manifest.json").read_text())["splits"].values()
    return folder, sum(facts["num_documents"] for facts in splits)


def _killed(program, source, output, killed_at):
    """What `_stored` finds of a call that was killed."""
    result = commands.run(program, source, output, str(killed_at), "1")
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not output.exists()
    return _stored(output)


@pytest.mark.parametrize(
    ("killed_at", "processes"), [*((n, 1) for n in (*range(2, 13, 2), *range(19, 100, 9))), (70, 2)]
)
def test_a_killed_call_is_continued(program, source, tmp_path, killed_at, processes):
    output = tmp_path / "records"
    folder, stored = _killed(program, source, output, killed_at)
    assert (stored > 0) == (killed_at > 10), stored
    result = commands.run(program, source, output, "0", str(processes))
    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout.split()[0]) == (len(TEXTS) - stored if processes == 1 else 0)
    assert _files(output) == _prepare(source, tmp_path / "undisturbed")
    verify_records(output)
    assert not folder.exists()


def test_calls_that_are_killed_one_after_another_come_to_an_end(program, source, tmp_path):
    output, num_killed = tmp_path / "records", 0
    while not output.exists():
        result = commands.run(program, source, output, "40", "1")
        num_killed += result.returncode == -signal.SIGKILL
        assert num_killed < 20
    assert num_killed > 2
    assert _files(output) == _prepare(source, tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda source, _: _write(source, ["x", *TEXTS[1:]]), r"the first \d+ documents"),
        (lambda source, _: _write(source, TEXTS[:5]), r"the first \d+ documents"),
        (lambda source, _: _write(source, [*TEXTS, *"abc"]), None),
        (
            lambda _, folder: flip_bit(folder / "train.00000.tokens.bin", 6),
            r"train\.00000\.tokens\.bin: its content changed",
        ),
        (
            lambda _, folder: (folder / "train.starts.bin").unlink(),
            r"train\.starts\.bin: missing",
        ),
        (lambda _, folder: (folder / "manifest.json").write_text("{"), None),
    ],
)
def test_only_what_did_not_change_is_continued(program, source, tmp_path, change, words):
    output = tmp_path / "records"
    folder, stored = _killed(program, source, output, 60)
    change(source, folder)
    is_kept = (folder / "manifest.json").stat().st_size > 2
    result = commands.run(program, source, output, "0", "1")
    if words is None:
        num_documents = len(source.read_text().splitlines())
        assert int(result.stdout.split()[0]) == num_documents - stored * is_kept
        assert _files(output) == _prepare(source, tmp_path / "undisturbed")
    else:
        assert re.search(rf"cannot be continued, .*\({words}\): restore it, or", result.stderr)
        assert _stored(output) == (folder, stored)


def test_other_arguments_are_refused(program, source, tmp_path):
    folder, _ = _killed(program, source, tmp_path / "records", 60)
    before = _files(folder)
    with pytest.raises(DataError, match=r"corpus.validation_percent: 30 -> 20\): restore it"):
        _prepare(source, folder, validation_percent=20)
    assert _files(folder) == before


def test_a_complete_folder_that_was_not_renamed_is_continued(source, tmp_path):
    files = _prepare(source, tmp_path / "records")
    assert len(files) > 4
    assert _prepare(source, tmp_path / "records") == files


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
        preparation._Writer(Path("/dev"), 9)._append("full", np.zeros(10**6, np.uint16))


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
