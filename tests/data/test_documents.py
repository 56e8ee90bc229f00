import importlib
import json
import sys

import pytest

from ttcd_jax.data.documents import Document, holds_many, read_documents, readable_glob
from ttcd_jax.errors import DataError, UserError

TEXTS = ["plain\n", "größe 日本 \u2028 \x00 🧮", "", None, "last"]
EXPECTED = [(text or "").encode() for text in TEXTS]


def _texts(path, field="text"):
    documents = list(read_documents(path, path.name, field))
    assert [d.name for d in documents] == [f"{path.name}:{i}" for i in range(len(documents))]
    return [document.text for document in documents]


def _json_lines():
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS).encode()


def test_a_plain_file_is_one_document_whatever_its_bytes(tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xff\r\nb")
    documents = list(read_documents(tmp_path / "a.md", "sub/a.md", "text"))
    assert documents == [Document("sub/a.md", b"\xff\r\nb")]
    assert not holds_many(tmp_path / "a.md")


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(_json_lines().replace(b"\n", b"\r\n\n", 1))
    assert holds_many(path)
    assert _texts(path) == EXPECTED


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "line 2 is not JSON"),
        (b'{"text": "\xff"}', "line 2 is not JSON"),
        (b'["text"]', r"line 2 has no field 'text'; pass --field \(there: none\)"),
        (b'{"body": "x", "id": 3}', r"line 2 has no field 'text'; .*\(there: body, id\)"),
        (b'{"text": ["x"]}', "line 2: 'text' is no text but list"),
        (b'{"text": "\\ud800"}', "line 2: 'text' is no Unicode text"),
    ],
)
def test_a_line_that_holds_no_text_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, {message}"):
        _texts(path)


def test_compressed_json_lines(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    data = _json_lines() * 5000  # several pieces
    frames = [zstandard.compress(part) for part in (data[:1000], b"", data[1000:])]
    path.write_bytes(b"".join(frames))
    assert _texts(path) == EXPECTED * 5000
    path.write_bytes(b"".join(frames)[:-1])
    with pytest.raises(DataError, match=r"a\.jsonl\.zst ends in the middle"):
        _texts(path)
    path.write_bytes(b"not compressed")
    with pytest.raises(DataError, match=r"a\.jsonl\.zst is no intact zstandard file"):
        _texts(path)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"n": range(5 * 200), "text": TEXTS * 200})
    parquet.write_table(table, path, row_group_size=300)
    assert _texts(path) == EXPECTED * 200
    with pytest.raises(DataError, match=r"no column 'body'; pass --field \(there: n, text\)"):
        _texts(path, "body")
    with pytest.raises(DataError, match="row 0: 'n' is no text but int"):
        _texts(path, "n")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet is no intact Parquet file"):
        _texts(path)


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
    with pytest.raises(UserError, match=r"no file below .* matches \*\.txt, \*\.jsonl"):
        readable_glob(tmp_path)
    (tmp_path / "deep").mkdir()
    for name, glob in [("index.json", "**/index.json"), ("b.jsonl", "**/*.jsonl")]:
        (tmp_path / "deep" / name).write_text("")
        assert readable_glob(tmp_path) == glob
        (tmp_path / "deep" / name).unlink()
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "deep" / "a.parquet").write_text("")
    with pytest.raises(UserError, match=r"--glob \(\*\*/\*\.txt, \*\*/\*\.parquet\)"):
        readable_glob(tmp_path)
