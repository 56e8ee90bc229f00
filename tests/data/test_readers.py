"""Files of documents: what every reader does, whatever is cut, changed, absent or in another
encoding (it reads what was written, or refuses in one line that names the folder of the file); how
much of one is in memory; what is left out."""

import bz2
import contextlib
import functools
import gzip
import json
import lzma
import random
import resource
import shutil
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import NamedTuple

import corpora
import numpy as np
import pyarrow
import pytest
import zstandard
from checks import refused
from damage import damaged, fuzz_file

from ttcd_jax.data.corpus import input_bytes, stream_documents
from ttcd_jax.data.documents import LeftOut, glob_of, read_documents
from ttcd_jax.data.records import MANIFEST, verify_records
from ttcd_jax.data.sources import RecordsConfig
from ttcd_jax.data.tokenizer import build_tokenizer, tokenizer_of, train_tokenizer
from ttcd_jax.errors import DataError, UserError

TEXTS = ["\ufeffa mark", "größe 日本 🧮", None, "a\r\nb\r\n", "", "x" * 70]
TEXTS += ["\x00\x1b[2J\u2028é\ufffe"]
BYTES = [text.encode() for text in TEXTS if text]
IDS = [[1, 2, 3], [70000] * 9, [], [5, 6], list(range(300)), [7], [8]]
IDS_BYTES = [np.array(ids, "<u4").tobytes() for ids in IDS if ids]
LINES, LINE = corpora.json_lines(TEXTS, id=1), json.dumps({"text": TEXTS[1]}, ensure_ascii=False)
TABLE = {"text": TEXTS * 3, "raw": [text and text.encode() for text in TEXTS] * 3}
TABLE |= {"ids": [np.array(ids, np.int32) if ids else None for ids in IDS] * 3}
PAIRS = [struct.pack("<qq", i, -i) for i in range(7)]
COLUMNS = {
    "ids": ("ndarray:uint32", None, [corpora.mds_array(ids) for ids in IDS]),
    "number": ("int", 8, [bytes(8)] * 7),
    "pair": ("ndarray:int64:2", 16, PAIRS),
    "raw": ("bytes", None, [b"\xff" * (i % 3) for i in range(7)]),
    "text": ("str", None, [(text or "").encode() for text in TEXTS]),
}


def _documents(path: Path, field: str = "text") -> list[bytes]:
    return [x.content for _, x in stream_documents(corpora.text_file(path, field=field))]


def _records(folder: Path, _: str) -> list[bytes]:
    (records,) = RecordsConfig(paths=(str(folder),), seq_len=8).open("train")
    facts = verify_records(folder)["splits"]["train"]
    assert f"{facts['num_documents']:,}" == f"{len(records):,}"
    return [records.read(i, 1, n - 1).astype("u1").tobytes() for i, n in enumerate(records.sizes)]


def _tokens(path: Path, _: str) -> list[bytes]:
    tokenizer = build_tokenizer(tokenizer_of(path))
    ids = tokenizer.encode("some text")
    tokenizer.num_bytes(np.minimum(ids, tokenizer.vocab_size - 1))
    return [ids.tobytes()]


def _resized(index: Path) -> None:
    """The entries get the sizes of their shards."""
    value = json.loads(index.read_text())
    for entry in value["shards"]:
        entry["raw_data"]["bytes"] = (index.parent / entry["raw_data"]["basename"]).stat().st_size
    index.write_text(json.dumps(value))


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
    (folder / "tokenizer.json").write_text(train_tokenizer(["some text of words"] * 3, 262))
    return folder / "tokenizer.json"


_zst = zstandard.ZstdCompressor(write_checksum=True).compress
TEXT = BYTES[0] + BYTES[1]
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
    "MDS": MDS._replace(json=("index.json", 500)),
    "MDS of ids": MDS._replace(contents=IDS_BYTES * 2, field="ids"),
    "packed MDS": Reader(lambda x: corpora.mds(x, COLUMNS, _zst), BYTES * 2, "all"),
    "Megatron": Reader(
        lambda x: corpora.megatron(x, "<i4", IDS, starts=[0, 2, 2, len(IDS)]),
        [b"".join(IDS_BYTES[:2]), b"".join(IDS_BYTES[2:])],
        "lengths",
    ),
    "records": Reader(
        _write_records, BYTES, "all", read=_records, json=(MANIFEST, 250), refit=corpora.reseal
    ),
    "tokenizer": Reader(_write_tokenizer, None, read=_tokens, json=("tokenizer.json", 600)),
}


@pytest.fixture(params=READERS)
def reader(request):
    return READERS[request.param]


@pytest.fixture
def path(reader, tmp_path):
    return reader.write(tmp_path)


@pytest.fixture
def intact(reader, path):
    """What is read of the intact file, whose size counts each file once."""
    documents = reader.read(path, reader.field)
    assert reader.contents is None or documents == reader.contents
    if reader.read is _documents:
        assert input_bytes(corpora.text_file(path)) == sum(map(len, _files(path).values()))
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


def test_cut_files_and_changed_bytes_are_refused_as_far_as_formats_can(reader, path, intact, found):
    for file, data in _files(path).items():
        for position in _some(len(data)):
            file.write_bytes(data[:position])
            documents = found()
            if documents is not None and documents != intact:
                assert not reader.tells, (file, position)
                assert b"".join(intact).startswith(b"".join(documents))
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


def test_an_absent_file_a_folder_and_another_encoding_are_refused_or_read(path, intact, found):
    for file, data in _files(path).items():
        for encoding in ("utf-16", "utf-16-be", "utf-32", "latin-1", "utf-8-sig"):
            with contextlib.suppress(UnicodeDecodeError):
                file.write_bytes(data.decode().encode(encoding, errors="replace"))
            as_it_is = [file.read_bytes()] if file.suffix == ".txt" else intact
            assert found() in (None, intact, as_it_is)
        file.unlink()
        assert found() in (None, intact)
        file.mkdir()
        assert found() in (None, intact)
        file.rmdir()
        file.write_bytes(data)
    shutil.rmtree(path.parent)
    assert found() is None


@pytest.mark.parametrize("name", [name for name in READERS if READERS[name].json])
def test_changed_values_of_json_are_refused_or_read(tmp_path, name):
    reader = READERS[name]
    path, (name, count) = reader.write(tmp_path), reader.json

    def read():
        if name == MANIFEST:
            corpora.reseal(path)
        reader.read(path, reader.field)

    fuzz_file((path if path.is_dir() else path.parent) / name, read, count, tmp_path)


@pytest.mark.parametrize(
    ("name", "numbers"), [("jsonl", [0, 1, 3, 5, 6]), ("MDS", [0, 1, 3, 5, 6, 7, 8, 10, 12, 13])]
)
def test_documents_are_numbered_empty_ones_too(tmp_path, name, numbers):
    path = READERS[name].write(tmp_path)
    names = [document.name for _, document in stream_documents(corpora.text_file(path))]
    assert names == [f"{path.name}:{number}" for number in numbers]


def test_kinds_of_columns_of_mds(tmp_path):
    path = corpora.mds(tmp_path, COLUMNS)
    assert _documents(path, "pair") == PAIRS * 2
    assert _documents(path, "raw") == [b"\xff", b"\xff\xff"] * 4


@pytest.mark.parametrize("dtype", corpora.MEGATRON_TYPES)
def test_kinds_of_token_ids_of_megatron(tmp_path, dtype):
    contents = [np.array(ids, dtype).tobytes() for ids in ([1, 2, 3], [4, 5, 6])]
    assert _documents(corpora.megatron(tmp_path, dtype)) == contents


@pytest.mark.parametrize("form", ["stream", "file"])
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_kinds_of_texts_of_arrow(tmp_path, form, kind):
    kinds = {"dictionary": lambda: pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    texts = pyarrow.array(TEXTS * 3, kinds.get(kind, getattr(pyarrow, kind))())
    path = corpora.table(tmp_path / "a.arrow", {"n": range(21), "text": texts}, 4, form)
    assert _documents(path) == BYTES * 3


ID_KINDS = {
    "short": pyarrow.array([[1, 2, 3], [], None], pyarrow.list_(pyarrow.int32())),
    "long": pyarrow.array([[1, 2, 3], [], None], pyarrow.large_list(pyarrow.int32())),
    "fixed": pyarrow.array([[1, 2, 3]] * 3, pyarrow.list_(pyarrow.int32(), 3)),
    "holes": pyarrow.array([[1, None]] * 3, pyarrow.list_(pyarrow.int32())),
    "words": pyarrow.array([["x"]] * 3, pyarrow.list_(pyarrow.string())),
    "n": pyarrow.array([1] * 3),
}


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_kinds_of_token_ids_of_tables(tmp_path, suffix):
    path, ids = corpora.table(tmp_path / f"a.{suffix}", ID_KINDS), np.arange(1, 4, dtype="<i4")
    for column, count in (("short", 1), ("long", 1), ("fixed", 3)):
        assert _documents(path, column) == [ids.tobytes()] * count
    words = f"a.{suffix} has null among the ids of 'holes': drop such rows"
    refused(words, _documents, path, "holes", error=DataError)
    refused("row 0: 'words' is no text but list", _documents, path, "words", error=DataError)
    refused("row 0: 'n' is no text but int", _documents, path, "n", error=DataError)
    refused("no column 'text'; pass --field (there: short,", _documents, path, error=DataError)


def _mds(field: str = "text", **changes) -> Reader:
    return MDS._replace(
        write=lambda x: corpora.mds(x, **{"columns": COLUMNS} | changes), field=field
    )


def _megatron(**changes) -> Reader:
    return Reader(lambda x: corpora.megatron(x, **changes), None)


def _lines(line: bytes) -> Reader:
    return _file("a.jsonl", b'{"text": "good"}\n' + line + b"\n" + line)


SHARD = "shard.00000.mds"
BAD_COLUMNS = {"ids": ("ndarray:uint32", None, [b"\x08\1\1" + bytes(4)])}
OBJECTS = "write an object on each line (jq -c"


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (_mds("body"), "no column 'body'; pass --field (there: ids, number, pair, raw, text)"),
        (_mds("number"), "column 'number' of | has encoding 'int'"),
        (_mds(version=1), "only MDS version 2"),
        (_mds(column_sizes=[None]), "columns without a name, an encoding or a size"),
        (_mds(column_encodings=["pkl", "int", "int", "bytes", "str"]), "pickled columns"),
        (_mds(samples=6), "does not hold the 6 samples"),
        (_mds(raw_data={"basename": "0/x.mds", "bytes": 1}), "'0/x.mds'|(--glob='*/index.json')"),
        (_mds(raw_data={"basename": "../x.mds", "bytes": 1}), "lists '../x.mds'"),
        (_mds(zip_data={"basename": "/etc/x"}), "lists '/etc/x', outside its folder"),
        (_mds(raw_data={"basename": "gone.mds", "bytes": 1}), "no shard at |gone.mds"),
        (_mds(raw_data={"basename": SHARD, "bytes": 1}), "its index says 1"),
        (_mds(raw_data={"basename": SHARD, "bytes": 2**40}), "a shard may have"),
        (_mds(raw_data=None), "no index of MDS shards"),
        (_mds(pack=bytes, compression="br"), "has compression 'br'; only zstd is read"),
        (_mds(pack=lambda x: zstandard.compress(b"xyz")), "holds 3 bytes, its index says"),
        (_mds("ids", columns=BAD_COLUMNS), "sample 0 holds no one-dimensional array of uint32"),
        (_megatron(magic=b"MMIDIDX\0\1"), "a.idx begins b'MMIDIDX\\x00\\x01', 1, 8; read"),
        (_megatron(version=2), "a.idx begins b'MMIDIDX\\x00\\x00', 2, 8; read"),
        (_megatron(code=7), "x00', 1, 7; |, 1, [1, 2, 3, 4, 5, 8]"),
        (_megatron(counts=(2**60, 2**60)), "1152921504606846976 sequences"),
        (_megatron(counts=(5, 4)), "has 114 bytes; 5 sequences and 4 documents take 126"),
        (_megatron(starts=[0, 2, 2, 3]), "a.bin has 6 ids in 4 sequences, its documents 4 in 3"),
        (_megatron(starts=[1, 2, 2, 4]), "does not fit |a.bin at document 0"),
        (_megatron(starts=[0, 3, 2, 4]), "does not fit | at document 1"),
        (_megatron(sizes=[3, -1, 2, 2]), "does not fit | at document 0"),
        (_megatron(sizes=[3, 0, 1, 3]), "does not fit | at document 2"),
        (_megatron(sizes=[3, 0, 1, 1]), "a.bin has 6 ids in 4 sequences, its documents 5 in 4"),
        (_megatron(offsets=[0, 6, 8, 10]), "does not fit | at document 2"),
        (_megatron(code=4), "does not fit | at document 2"),
        (_lines(b'{"text": "cut'), "line 2 is not JSON"),
        (_lines(b'["text"]'), f"line 2 is no object but list; {OBJECTS}"),
        (_lines(b"["), f"line 2 is not JSON (Exp|; {OBJECTS}"),
        (_lines(b'{"text": {"a": 1}}'), "'text' is no text but dict; |or make one of its values"),
        (_lines(b'{"body": "x", "id": 3}'), "line 2 has no field 'text'; |(there: body, id)"),
        (_lines(b'{"text": ["x"]}'), "line 2: 'text' is no text but list"),
        (_lines(b'{"text": "\\ud800"}'), "line 2: 'text' is no Unicode text"),
        (_lines(b"[" * 200_000), "line 2 is not JSON (maximum recursion"),
        (_file("a.jsonl", '{"text": "x"}'.encode("utf-16")), "1 of 1 lines |line 1 is not JSON"),
        (_file("a.txt", "text".encode("utf-16")), "a.txt is UTF-16 text: make it UTF-8"),
        *(
            (_file("a.txt", pack(b"x")), "a.txt is packed, not text: unpack it")
            for pack in (gzip.compress, bz2.compress, lzma.compress)
        ),
        (
            _file("a.jsonl.bz2", b""),
            "is of an unknown kind (known: *.txt, |name plain text a.jsonl.bz2.txt",
        ),
    ],
)
def test_what_a_file_may_not_say(reader, tmp_path, words):
    refused(words, _documents, reader.write(tmp_path), reader.field, error=DataError)


def test_a_few_lines_that_hold_no_text_are_counted_and_left_out(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    corpus, lines = corpora.text_file(path), [f'{{"text": "{i}"}}\n' for i in range(2000)]
    lines[7], lines[9] = "{\n", "\n"
    path.write_text("".join(lines))
    names = [document.name for _, document in stream_documents(corpus)]
    # The number of a document does not change when a line before it is repaired.
    assert names == [f"a.jsonl:{i}" for i in range(1999) if i != 7]
    assert f"1 of 1,999 lines hold no document: {path}, line 8 is not JSON" in caplog.text
    assert corpora.records(corpus, tmp_path / "records")["lines_left_out"] == 1
    (reason,) = json.loads((tmp_path / "records" / "left_out.json").read_text())
    assert reason.startswith(f"{path}, line 8 is not JSON")
    lines[8] = "{\n"
    path.write_text("".join(lines[:500]))
    words = "2 of 499 lines hold no document: |, line 8 | 0.1%"
    refused(words, list, stream_documents(corpus), error=DataError)
    path.write_text('{"body": "x"}\n' * 20)  # a wrong field: the rest is not read
    words = "11 of 11 lines hold no document: |line 1 has no field"
    refused(words, list, stream_documents(corpus), error=DataError)


def test_a_reader_that_yields_no_bytes_is_refused(tmp_path, monkeypatch):
    readers = {"*.xml": lambda path, field: iter(["a text"])}
    monkeypatch.setattr("ttcd_jax.data.documents._READERS", readers)
    (tmp_path / "a.xml").write_text("a text")
    words = "the reader of *.xml yields str: yield text.encode"
    refused(words, _documents, tmp_path / "a.xml")


@pytest.mark.parametrize(("kind", "compress"), [("zst", zstandard.compress), ("gz", gzip.compress)])
def test_compressed_json_lines_in_several_parts(tmp_path, kind, compress):
    path, data = tmp_path / f"a.jsonl.{kind}", LINES * 5000
    path.write_bytes(b"".join(map(compress, (data[:1000], b"", data[1000:]))))
    assert _documents(path) == BYTES * 5000


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.txt.zst", "a.jsonl", "a.txt"])
def test_a_document_beyond_the_limit_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, name):
    monkeypatch.setattr("ttcd_jax.data.documents.MAX_BYTES", 2**20)
    with (tmp_path / name).open("wb") as file:
        if name.endswith("zst"):
            with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed:
                for _ in range(2**10):
                    packed.write(bytes(2**20))
        else:
            file.truncate(2**30)
    words = "has more than 1048576 bytes, the largest document"
    refused(words, _documents, tmp_path / name, error=DataError)


def test_rows_are_in_memory_one_by_one(tmp_path):
    ids = np.zeros(2**20, np.int32)
    path = corpora.table(tmp_path / "a.arrow", {"ids": pyarrow.array([ids] * 8)}, 4)
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    for document in read_documents(path, "a", "ids", LeftOut()):
        assert document.tokens.size == 2**20
        assert pyarrow.total_allocated_bytes() - before < 2**21
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()


@pytest.mark.parametrize(("kind", "library"), [("jsonl.zst", "zstandard"), ("parquet", "pyarrow")])
def test_a_missing_library_is_named(tmp_path, monkeypatch, kind, library):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / f"a.{kind}").write_bytes(b"")
    words = f"a.{kind} cannot be read without {library}: pip install"
    refused(words, _documents, tmp_path / f"a.{kind}")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], "no file below | matches *.txt, *.txt.gz"),
        (["deep/index.json", "x.md"], "**/index.json"),
        (["deep/b.jsonl.gz"], "**/*.jsonl.gz"),
        (["notes.txt", "deep/a.parquet"], "choose one by --glob (**/*.txt, **/*.parquet)"),
        (["deep/a.arrow"], "**/*.arrow"),
        (["dataset_info.json", "a.arrow"], "written by `datasets`: choose tables by --glob (**/*"),
    ],
)
def test_the_kind_of_a_folder(names, found):
    find = functools.partial(glob_of, "folder", list(map(PurePath, names)))
    assert find() == found if found.startswith("**") else refused(found, find)
