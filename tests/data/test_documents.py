import bz2
import gzip
import lzma
import resource
import sys

import corpora
import pytest
import zstandard

from ttcd_jax.data.corpus import CorpusConfig, stream_documents
from ttcd_jax.data.documents import Document, LeftOut, holds_many, read_documents, readable_glob
from ttcd_jax.errors import DataError, UserError

TEXTS = ["plain\n", "größe 日本 \u2028 \x00 🧮", "", None, "last"]
EXPECTED = [(text or "").encode() for text in TEXTS]


def _texts(path, field="text"):
    left_out = LeftOut()
    documents = list(read_documents(path, path.name, field, left_out))
    left_out.check()
    assert [d.name for d in documents] == [f"{path.name}:{i}" for i in range(len(documents))]
    return [document.text for document in documents]


LINES = corpora.json_lines(TEXTS, id=1)


def test_a_plain_file_is_one_document_whatever_its_bytes(tmp_path):
    for name, pack in (("a.txt", bytes), ("a.md", bytes), ("a.txt.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(b"\xff\r\nb"))
        documents = list(read_documents(tmp_path / name, f"sub/{name}", "text", LeftOut()))
        assert documents == [Document(f"sub/{name}", b"\xff\r\nb")]
    assert not holds_many(tmp_path / "a.txt")
    assert not holds_many(tmp_path / "a.txt.gz")


@pytest.mark.parametrize("name", ["a.md", "a.csv", "a.jsonl.bz2", "a.json", "a"])
def test_a_file_of_an_unknown_kind_is_refused_by_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"anything")
    corpus = CorpusConfig(kind="text", path=str(tmp_path / name))
    with pytest.raises(
        DataError,
        match=rf"{name} is of an unknown kind \(known: \*\.txt, .*name plain text {name}\.txt",
    ):
        list(stream_documents(corpus))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_packed_data_are_no_text_whatever_their_name(tmp_path, pack):
    (tmp_path / "a.txt").write_bytes(pack(b"text"))
    with pytest.raises(DataError, match=r"a\.txt is packed, not text: unpack it"):
        _texts(tmp_path / "a.txt")


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES.replace(b"\n", b"\r\n\n", 1))
    assert holds_many(path)
    assert _texts(path) == EXPECTED


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "line 2 is not JSON"),
        (b'{"text": "\xff"}', "line 2 is not JSON"),
        (b'["text"]', r"line 2 is no object but list; write an object on each line \(jq -c"),
        (b"[", r"line 2 is not JSON \(Exp.*; write an object on each line \(jq -c"),
        (
            b'{"text": {"a": 1, "b": 2}}',
            r"line 2: 'text' is no text but dict; .*or make one of its values",
        ),
        (b'{"body": "x", "id": 3}', r"line 2 has no field 'text'; .*\(there: body, id\)"),
        (b'{"text": ["x"]}', "line 2: 'text' is no text but list"),
        (b'{"text": "\\ud800"}', "line 2: 'text' is no Unicode text"),
        (b"[" * 200_000, r"line 2 is not JSON \(maximum recursion"),
    ],
)
def test_a_line_that_holds_no_text_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    assert _texts(path) == [b"good"]  # a single one is left out
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n" + line)
    with pytest.raises(DataError, match=rf"a\.jsonl, {message}"):
        _texts(path)


def test_a_few_lines_that_hold_no_text_are_counted_and_left_out(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    lines = [f'{{"text": "{i}"}}\n' for i in range(2000)]
    lines[7], lines[9] = "{\n", "\n"
    path.write_text("".join(lines))
    corpus = CorpusConfig(kind="text", path=str(path), validation_percent=0)
    names = [document.name for _, document in stream_documents(corpus)]
    # The number of a document does not change when a line before it is repaired.
    assert names == [f"a.jsonl:{i}" for i in range(1999) if i != 7]
    assert f"1 of 1,999 lines hold no document: {path}, line 8 is not JSON" in caplog.text
    lines[8] = "{\n"
    path.write_text("".join(lines[:500]))
    with pytest.raises(DataError, match=r"2 of 499 lines hold no document: .*, line 8 .* 0\.1%"):
        list(stream_documents(corpus))


def test_a_wrong_field_ends_before_the_corpus_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x"}\n' * 20)
    with pytest.raises(DataError, match=r"11 of 11 lines hold no document: .*line 1 has no field"):
        list(stream_documents(CorpusConfig(kind="text", path=str(path))))


@pytest.mark.parametrize(("kind", "compress"), [("zst", zstandard.compress), ("gz", gzip.compress)])
def test_compressed_json_lines_in_several_parts(tmp_path, kind, compress):
    path, data = tmp_path / f"a.jsonl.{kind}", LINES * 5000
    path.write_bytes(b"".join(map(compress, (data[:1000], b"", data[1000:]))))
    assert _texts(path) == EXPECTED * 5000


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.txt.zst", "a.jsonl", "a.txt"])
def test_a_document_beyond_the_limit_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, name):
    monkeypatch.setattr("ttcd_jax.data.documents.MAX_BYTES", 2**20)
    if name.endswith("zst"):
        compressor = zstandard.ZstdCompressor().compressobj()
        pieces = [compressor.compress(bytes(2**20)) for _ in range(2**10)]
        (tmp_path / name).write_bytes(b"".join([*pieces, compressor.flush()]))
    else:
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="has more than 1048576 bytes, the largest document"):
        _texts(tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_parquet(tmp_path):
    table = {"n": range(5 * 200), "text": TEXTS * 200}
    path = corpora.table(tmp_path / "a.parquet", table, 300)
    assert _texts(path) == EXPECTED * 200
    with pytest.raises(DataError, match=r"no column 'body'; pass --field \(there: n, text\)"):
        _texts(path, "body")
    with pytest.raises(DataError, match="row 0: 'n' is no text but int"):
        _texts(path, "n")


@pytest.mark.parametrize(
    ("name", "library"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")]
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=rf"{name} cannot be read without {library}: pip install"):
        _texts(tmp_path / name)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl cannot be read: No such file"):
        _texts(tmp_path / "absent.jsonl")


def test_the_kind_of_a_folder(tmp_path):
    with pytest.raises(UserError, match=r"no file below .* matches \*\.txt, \*\.txt\.gz"):
        readable_glob(tmp_path)
    (tmp_path / "deep").mkdir()
    for name, glob in [("index.json", "**/index.json"), ("b.jsonl.gz", "**/*.jsonl.gz")]:
        (tmp_path / "deep" / name).write_text("")
        assert readable_glob(tmp_path) == glob
        (tmp_path / "deep" / name).unlink()
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "deep" / "a.parquet").write_text("")
    with pytest.raises(UserError, match=r"--glob \(\*\*/\*\.txt, \*\*/\*\.parquet\)"):
        readable_glob(tmp_path)


def test_utf_16_is_refused_by_name(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}', encoding="utf-16")
    with pytest.raises(DataError, match=r"a\.txt is UTF-16 text: make it UTF-8"):
        list(read_documents(tmp_path / "a.txt", "a.txt", "text", LeftOut()))
    with pytest.raises(DataError, match=r"1 of 1 lines .*a\.jsonl, line 1 is not JSON"):
        _texts(tmp_path / "a.jsonl")
