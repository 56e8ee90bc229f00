"""What every reader does, whatever is cut, changed, absent or in another encoding: it reads what
was written, or refuses in one line that names the folder of the file."""

import gzip
import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import corpora
import numpy as np
import pytest
import tokenizers
import zstandard
from damage import damaged, fuzz

from ttcd_jax.data.corpus import stream_documents
from ttcd_jax.data.mixture import RecordsConfig
from ttcd_jax.data.records import MANIFEST, sealed, verify_records
from ttcd_jax.data.tokenizer import JsonTokenizer
from ttcd_jax.errors import UserError
from ttcd_jax.files import sha256

TEXTS = [
    "\ufeffa mark",
    "größe 日本 🧮",
    None,
    "a\r\nb\r\n",
    "",
    "x" * 70,
    "\x00\x1b[2J\u2028é\ufffe",
]
BYTES = [text.encode() for text in TEXTS if text]
IDS = [[1, 2, 3], [70000] * 9, [], [5, 6], list(range(300)), [7], [8]]
IDS_BYTES = [np.array(ids, "<u4").tobytes() for ids in IDS if ids]
LINES, LINE = corpora.json_lines(TEXTS, id=1), json.dumps({"text": TEXTS[1]}, ensure_ascii=False)
TABLE = {"text": TEXTS * 3, "raw": [text and text.encode() for text in TEXTS] * 3}
TABLE |= {"ids": [np.array(ids, np.int32) if ids else None for ids in IDS] * 3}
COLUMNS = {
    "ids": ("ndarray:uint32", None, [corpora.mds_array(ids) for ids in IDS]),
    "number": ("int", 8, [bytes(8)] * len(IDS)),
    "text": ("str", None, [(text or "").encode() for text in TEXTS]),
}


def _documents(path: Path, field: str) -> list[bytes]:
    return [x.content for _, x in stream_documents(corpora.text_file(path, field=field))]


def _records(folder: Path, _: str) -> list[bytes]:
    (records,) = RecordsConfig(paths=(str(folder),), seq_len=8).open("train")
    facts = verify_records(folder)["splits"]["train"]
    assert f"{facts['num_documents']:,}" == f"{len(records):,}"
    return [records.read(i, 1, n - 1).astype("u1").tobytes() for i, n in enumerate(records.sizes)]


def _tokens(path: Path, _: str) -> list[bytes]:
    tokenizer = JsonTokenizer(str(path))
    ids = tokenizer.encode("some text")
    tokenizer.num_bytes(np.minimum(ids, tokenizer.vocab_size - 1))
    return [ids.tobytes()]


def _resized(index: Path) -> None:
    """The entries get the sizes of their shards."""
    value = json.loads(index.read_text())
    for entry in value["shards"]:
        entry["raw_data"]["bytes"] = (index.parent / entry["raw_data"]["basename"]).stat().st_size
    index.write_text(json.dumps(value))


def _resealed(folder: Path) -> None:
    """The manifest gets the digests of the files, and its own, as if they were hostile."""
    manifest = json.loads((folder / MANIFEST).read_text())
    if isinstance(manifest, dict):
        files = manifest.get("files")
        for name, facts in files.items() if isinstance(files, dict) else ():
            if isinstance(facts, dict) and (folder / name[:99]).is_file():
                facts["sha256"] = sha256(folder / name)
        manifest = sealed({name: x for name, x in manifest.items() if name != "sha256"})
    (folder / MANIFEST).write_text(json.dumps(manifest))


class Reader(NamedTuple):
    """Of a file, made by `write` in a new folder; its documents have `contents`. `tells`: what it
    knows besides: its end, the lengths of its documents, or all content. `json`: the file whose
    values are changed, that many times. `refit` makes others agree with a file that was changed."""

    write: Callable[[Path], Path]
    contents: list[bytes] | None
    tells: str = "end"
    field: str = "text"
    read: Callable[[Path, str], list[bytes]] = _documents
    json: tuple[str, int] | None = None
    refit: Callable[[Path], None] | None = None


def _file(name: str, data: bytes, contents: list[bytes] = BYTES, tells: str = "") -> Reader:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return Reader(write, contents, tells)


def _table(name: str, field: str, form: str = "stream") -> Reader:
    contents = (IDS_BYTES if field == "ids" else BYTES) * 3
    return Reader(lambda x: corpora.table(x / name, TABLE, 4, form), contents, field=field)


def _write_records(folder: Path) -> Path:
    corpus = corpora.text_file(_file("a.jsonl", LINES).write(folder))
    corpora.records(corpus, folder / "records", shard_tokens=60)
    return folder / "records"


def _write_tokenizer(folder: Path) -> Path:
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    options = {"show_progress": False, "special_tokens": ["<s>", "</s>"]}
    tokenizer.train_from_iterator(["some text of words"] * 3, 262, **options)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


_zst = zstandard.ZstdCompressor(write_checksum=True).compress
TEXT = BYTES[0] + BYTES[1]
SAVED = Path(__file__).with_name("datasets_folder") / "saved"
MDS = Reader(lambda x: corpora.mds(x, COLUMNS), BYTES * 2, "lengths", refit=_resized)
READERS = {
    "txt": _file("a.txt", TEXT, [TEXT]),
    "txt.gz": _file("a.txt.gz", gzip.compress(TEXT), [TEXT], "all"),
    "txt.zst": _file("a.txt.zst", _zst(TEXT), [TEXT], "all"),
    "jsonl": _file("a.jsonl", LINES),
    "jsonl in UTF-8": _file("a.jsonl", f"{LINE}\r\n\n{LINE}".encode(), [BYTES[1]] * 2),
    "jsonl.gz": _file("a.jsonl.gz", gzip.compress(LINES), tells="all"),
    "jsonl.zst": _file("a.jsonl.zst", _zst(LINES), tells="all"),
    "json.gz": _file("a.json.gz", gzip.compress(LINES), tells="all"),
    "parquet": _table("a.parquet", "text"),
    "parquet of bytes": _table("a.parquet", "raw"),
    "parquet of ids": _table("a.parquet", "ids"),
    "arrow": _table("a.arrow", "text"),
    "arrow of ids": _table("a.arrow", "ids"),
    "arrow file": _table("a.arrow", "text", "file"),
    "arrow file of ids": _table("a.arrow", "ids", "file"),
    "saved": Reader(
        lambda x: shutil.copytree(SAVED, x, dirs_exist_ok=True) / "state.json",
        [b"one", "größe 日本".encode(), b"last"],
        json=("state.json", 100),
    ),
    "MDS": MDS._replace(json=("index.json", 500)),
    "MDS of ids": MDS._replace(contents=IDS_BYTES * 2, field="ids"),
    "packed MDS": MDS._replace(
        write=lambda x: corpora.mds(x, COLUMNS, _zst), tells="all", refit=None
    ),
    "Megatron": Reader(
        lambda x: corpora.megatron(x, "<i4", IDS, starts=[0, 2, 2, len(IDS)]),
        [b"".join(IDS_BYTES[:2]), b"".join(IDS_BYTES[2:])],
        "lengths",
    ),
    "records": Reader(
        _write_records, BYTES, "all", read=_records, json=(MANIFEST, 400), refit=_resealed
    ),
    "tokenizer": Reader(_write_tokenizer, None, read=_tokens, json=("tokenizer.json", 1500)),
}


@pytest.fixture(params=READERS)
def reader(request):
    return READERS[request.param]


@pytest.fixture
def path(reader, tmp_path):
    return reader.write(tmp_path)


@pytest.fixture
def intact(reader, path):
    """What is read of the intact file."""
    documents = reader.read(path, reader.field)
    assert reader.contents is None or documents == reader.contents
    return documents


@pytest.fixture
def found(reader, path):
    """What is read now; None if that is refused."""

    def read():
        try:
            return reader.read(path, reader.field)
        except UserError as error:
            message = str(error)
        assert str(path.parent) in message

    return read


@pytest.fixture(autouse=True)
def memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def _files(path):
    return {x: x.read_bytes() for x in (path if path.is_dir() else path.parent).iterdir()}


def _some(size):
    """The first positions, and about fifty of the others."""
    return (*range(min(size, 40)), *range(40, size, 1 + size // 50))


def test_a_cut_file_is_refused_or_is_a_beginning(reader, path, intact, found):
    for file, data in _files(path).items():
        for size in _some(len(data)):
            file.write_bytes(data[:size])
            documents = found()
            if documents is not None and documents != intact:
                assert not reader.tells, (file, size)
                assert b"".join(intact).startswith(b"".join(documents))
        file.write_bytes(data)


def test_a_changed_byte_is_refused_or_changes_no_more_than_the_format_cannot_know(
    reader, path, intact, found
):
    for file, data in _files(path).items():
        for position in _some(len(data)):
            changed = bytes([data[position] ^ (1, 0xFF)[position % 2]])
            file.write_bytes(data[:position] + changed + data[position + 1 :])
            if (documents := found()) is not None and reader.tells in ("all", "lengths"):
                assert [*map(len, documents)] == [*map(len, intact)], (file, position)
                assert documents == intact or reader.tells == "lengths", (file, position)
        file.write_bytes(data)


def test_damage_is_refused_or_read(reader, path, found):
    files, num_refused = _files(path), 0
    for seed in range(100):
        draw = random.Random(seed)
        file = draw.choice(sorted(files))
        file.write_bytes(damaged(files[file], draw))
        if reader.refit and file.suffix != ".json" and draw.random() < 0.8:
            reader.refit(path)
        num_refused += found() is None
        for file, data in files.items():
            file.write_bytes(data)
    assert num_refused or reader.tells == ""


@pytest.mark.parametrize("name", [name for name in READERS if READERS[name].json])
def test_changed_values_of_json_are_refused_or_read(tmp_path, name):
    reader = READERS[name]
    path, (name, count) = reader.write(tmp_path), reader.json
    file = (path if path.is_dir() else path.parent) / name

    def read(value):
        file.write_text(json.dumps(value))
        if name == MANIFEST:
            _resealed(path)
        reader.read(path, reader.field)

    fuzz(json.loads(file.read_text()), read, count, named=tmp_path)


def test_a_file_that_is_absent_or_a_folder_is_refused(path, intact, found):
    for file, data in _files(path).items():
        file.unlink()
        assert found() in (None, intact)
        file.mkdir()
        assert found() in (None, intact)
        file.rmdir()
        file.write_bytes(data)
    shutil.rmtree(path.parent)
    assert found() is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "latin-1", "utf-8-sig"])
def test_another_encoding_is_refused_or_read_as_it_is(path, intact, found, encoding):
    for file, data in _files(path).items():
        try:
            file.write_bytes(data.decode().encode(encoding, errors="replace"))
        except UnicodeDecodeError:
            continue
        as_it_is = [file.read_bytes()] if file.suffix == ".txt" else intact
        assert found() in (None, intact, as_it_is)
        file.write_bytes(data)
