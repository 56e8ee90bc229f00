"""Files of documents: their kinds, what is left out of them, and how much of one is in memory."""

import gzip
import resource
import shutil
import sys
import tracemalloc
from pathlib import Path

import corpora
import numpy as np
import pyarrow
import pytest
import zstandard
from checks import refused

from ttcd_jax.data.corpus import CorpusConfig, load_documents, stream_documents
from ttcd_jax.data.documents import Document, LeftOut, read_documents, readable_glob
from ttcd_jax.errors import DataError, UserError

WRITTEN = Path(__file__).with_name("datasets_folder")  # by `datasets` (its README.md)
TEXTS = ["plain\n", "größe 日本 \u2028 \x00 🧮", "", None, "last"]
LINES = corpora.json_lines(TEXTS, id=1)


def _texts(path):
    return [document.text for document in read_documents(path, path.name, "text", LeftOut())]


def test_a_plain_file_is_one_document_whatever_its_bytes(tmp_path):
    for name, pack in (("a.txt", bytes), ("a.md", bytes), ("a.txt.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(b"\xff\r\nb"))
        documents = list(read_documents(tmp_path / name, f"sub/{name}", "text", LeftOut()))
        assert documents == [Document(f"sub/{name}", b"\xff\r\nb")]


def test_a_few_lines_that_hold_no_text_are_counted_and_left_out(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    corpus, lines = corpora.text_file(path), [f'{{"text": "{i}"}}\n' for i in range(2000)]
    lines[7], lines[9] = "{\n", "\n"
    path.write_text("".join(lines))
    names = [document.name for _, document in stream_documents(corpus)]
    # The number of a document does not change when a line before it is repaired.
    assert names == [f"a.jsonl:{i}" for i in range(1999) if i != 7]
    assert f"1 of 1,999 lines hold no document: {path}, line 8 is not JSON" in caplog.text
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
    with pytest.raises(UserError, match=r"the reader of \*\.xml yields str: yield text\.encode"):
        _texts(tmp_path / "a.xml")


@pytest.mark.parametrize(("kind", "compress"), [("zst", zstandard.compress), ("gz", gzip.compress)])
def test_compressed_json_lines_in_several_parts(tmp_path, kind, compress):
    path, data = tmp_path / f"a.jsonl.{kind}", LINES * 5000
    path.write_bytes(b"".join(map(compress, (data[:1000], b"", data[1000:]))))
    assert _texts(path) == [(text or "").encode() for text in TEXTS] * 5000


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
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = "has more than 1048576 bytes, the largest document"
    refused(words, _texts, tmp_path / name, error=DataError)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


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


@pytest.mark.parametrize(
    ("name", "library"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")]
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).write_bytes(b"")
    refused(f"{name} cannot be read without {library}: pip install", _texts, tmp_path / name)


def test_the_kind_of_a_folder(tmp_path):
    refused("no file below | matches *.txt, *.txt.gz", readable_glob, tmp_path)
    (tmp_path / "deep").mkdir()
    for name, glob in [("index.json", "**/index.json"), ("b.jsonl.gz", "**/*.jsonl.gz")]:
        (tmp_path / "deep" / name).write_text("")
        assert readable_glob(tmp_path) == glob
        (tmp_path / "deep" / name).unlink()
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "deep" / "a.parquet").write_text("")
    refused("--glob (**/*.txt, **/*.parquet)", readable_glob, tmp_path)


def test_the_cache_of_datasets_with_an_intermediate_result_and_without(tmp_path):
    words = "several tables: choose one by --glob (**/cache-|, **/json-train*.arrow)"
    refused(words, readable_glob, WRITTEN / "cache")
    for name in ("json-train-00000-of-00002.arrow", "json-train-00001-of-00002.arrow"):
        shutil.copyfile(WRITTEN / "cache" / "json-train.arrow", tmp_path / name)
    shutil.copyfile(WRITTEN / "cache" / "dataset_info.json", tmp_path / "dataset_info.json")
    assert readable_glob(tmp_path) == "**/*.arrow"
    assert _texts(tmp_path / name) == [b"one", "größe 日本".encode(), b"", b"", b"last"]


def test_splits_of_a_saved_folder(tmp_path):
    for split in ("train", "validation"):
        shutil.copytree(WRITTEN / "saved", tmp_path / split)
    splits = tmp_path / "dataset_dict.json"
    splits.write_text('{"splits": ["train", "validation"]}')
    assert readable_glob(tmp_path) == "**/state.json"
    corpus = CorpusConfig(kind="text", path=str(tmp_path), glob="**/state.json")
    assert len(load_documents(corpus, "validation")) == 3
    splits.write_text('{"splits": ["train", "test"]}')
    refused("lists the splits ['train', 'test']: give the folder", readable_glob, tmp_path)
