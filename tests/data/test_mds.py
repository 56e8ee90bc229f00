"""MDS folders (corpora.py)."""

import functools
import struct

import corpora
import numpy as np
import pytest
import zstandard
from corpora import mds_array

from ttcd_jax.data.corpus import CorpusConfig, input_bytes
from ttcd_jax.data.documents import LeftOut, read_documents
from ttcd_jax.data.mds import read_column
from ttcd_jax.data.mixture import RecordsConfig
from ttcd_jax.errors import DataError

TEXTS = ["one", "", "größe 日本", "x" * 300]
IDS = [[1, 2, 3], [70000], list(range(300)), [5] * 70000]


COLUMNS = {
    "ids": ("ndarray:uint32", None, [mds_array(ids) for ids in IDS]),
    "number": ("int", 8, [struct.pack("<q", i) for i in range(4)]),
    "pair": ("ndarray:int64:2", 16, [struct.pack("<qq", i, -i) for i in range(4)]),
    "raw": ("bytes", None, [b"\xff" * i for i in range(4)]),
    "text": ("str", None, [text.encode() for text in TEXTS]),
}


@pytest.fixture
def write(tmp_path):
    """Writes two shards and their index; options replace parts of an index entry."""
    return functools.partial(corpora.mds, tmp_path)


def test_bytes_and_arrays_of_one_length(write):
    assert list(read_column(write(COLUMNS), "raw")) == [b"\xff" * i for i in range(4)] * 2
    pairs = [ids.tolist() for ids in read_column(write(COLUMNS), "pair")]
    assert pairs == [[0, 0], [1, -1], [2, -2], [3, -3]] * 2


def test_the_size_of_a_folder_counts_each_file_once(write):
    index = write(COLUMNS)
    corpus = CorpusConfig(kind="text", path=str(index.parent), glob="**/index.json")
    assert input_bytes(corpus) == sum(path.stat().st_size for path in index.parent.iterdir())


def test_documents_of_text_and_of_token_ids(write):
    documents = list(read_documents(write(COLUMNS), "books/index.json", "text", LeftOut()))
    assert [d.name for d in documents] == [f"books/index.json:{i}" for i in range(8)]
    assert [d.text.decode() for d in documents] == TEXTS * 2
    tokenized = list(read_documents(write(COLUMNS), "books/index.json", "ids", LeftOut()))
    assert [d.tokens.tolist() for d in tokenized] == IDS * 2
    assert {d.text for d in tokenized} == {b""}


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda data: zstandard.compress(b"xyz"), "zstd holds 3 bytes, its index says"),
        (lambda data: zstandard.compress(data)[:-1], "zstd is no intact zstd file"),
    ],
)
def test_compressed_shards(write, pack, message):
    assert len(list(read_column(write(COLUMNS, zstandard.compress), "text"))) == 8
    with pytest.raises(DataError, match=rf"shard\.00000\.mds\.{message}"):
        list(read_column(write(COLUMNS, pack), "text"))


@pytest.mark.parametrize(
    ("column", "changes", "message"),
    [
        ("body", {}, "no column 'body', only ids, number, pair, raw, text"),
        ("number", {}, "column 'number' of .* has encoding 'int'"),
        ("text", {"version": 1}, "only MDS version 2"),
        ("text", {"format": "json"}, "only MDS version 2"),
        ("text", {"column_sizes": [None]}, "columns without a name, an encoding or a size"),
        ("text", {"column_encodings": ["pkl", "int", "int", "bytes", "str"]}, "pickled columns"),
        ("text", {"samples": 5}, "does not hold the 5 samples"),
        ("text", {"samples": -1}, "does not hold the -1 samples"),
        ("text", {"raw_data": {"basename": "../x.mds", "bytes": 1}}, r"lists '\.\./x\.mds'"),
        ("text", {"raw_data": {"basename": "..", "bytes": 1}}, r"lists '\.\.'"),
        ("text", {"zip_data": {"basename": "/etc/x"}}, "lists '/etc/x', outside its folder"),
        ("text", {"raw_data": {"basename": "gone.mds", "bytes": 1}}, "no shard at .*gone.mds"),
        ("text", {"raw_data": {"basename": "shard.00000.mds", "bytes": 1}}, "its index says 1"),
        ("text", {"raw_data": None}, "no index of MDS shards"),
        ("text", {"column_names": 3}, "no index of MDS shards"),
        ("text", {"samples": 1e400}, "is not JSON"),
        ("text", {"samples": "x"}, "no index of MDS shards"),
        ("text", {"raw_data": {"basename": "shard.00000.mds", "bytes": 2**40}}, "shard may have"),
        ("text", {"raw_data": {"basename": "shard.00000.mds", "bytes": -1}}, "shard may have"),
        ("text", {"pack": bytes, "compression": "br"}, "has compression 'br'; only zstd is read"),
        (
            "ids",
            {"columns": {"ids": ("ndarray:uint32", None, [b"\x08\x01\x01" + bytes(4)] * 4)}},
            "sample 0 holds no one-dimensional array of uint32",
        ),
    ],
)
def test_what_an_index_may_not_say(write, column, changes, message):
    with pytest.raises(DataError, match=message):
        list(read_column(write(**{"columns": COLUMNS} | changes), column))


SAMPLE = 65_536


@pytest.fixture
def samples(write, tmp_path):
    """A folder of packed samples, made twice from the same ones: (as documents, as rows)."""
    ids = np.random.default_rng(0).integers(0, 256, (4, SAMPLE))
    columns = {"input_ids": ("ndarray:uint32", None, [mds_array(x) for x in ids])}
    corpus = corpora.text_file(write(columns), field="input_ids")
    for is_row in (False, True):
        corpora.records(corpus, tmp_path / f"records_{is_row}", samples_are_rows=is_row)
    return ids, str(tmp_path / "records_False"), str(tmp_path / "records_True")


@pytest.mark.parametrize("seq_len", [SAMPLE, SAMPLE - 1])
def test_samples_that_are_rows_stay_rows(samples, seq_len):
    ids, _, folder = samples
    rows, manifest = RecordsConfig(paths=(folder,), seq_len=seq_len).rows(0)
    assert manifest["num_rows"] == 8
    found = []
    for number in range(8):
        row = rows[number]
        found.append(np.append(row["tokens"][: SAMPLE - 1], row["targets"][SAMPLE - 2]).tobytes())
        for name, expected in (("segment_ids", 1), ("positions", range(SAMPLE - 1))):
            assert np.all(row[name][: SAMPLE - 1] == expected)
        assert row["loss_mask"].sum() == SAMPLE - 1
        assert not row["loss_mask"][SAMPLE - 1 :].any()
    assert sorted(found) == sorted(2 * [x.astype(np.int32).tobytes() for x in ids])


def test_samples_that_are_documents_are_cut(samples):
    """Why there is the other way: most rows hold the end of one sample and another's beginning."""
    _, documents, rows = samples
    source, _ = RecordsConfig(paths=(documents,), seq_len=SAMPLE).rows(0)
    assert sum(source[i]["segment_ids"].max() > 1 for i in range(8)) >= 7
    message = r"has a sample of 65536 tokens: set seq_len to 65535 or more \(not 65534\)"
    with pytest.raises(DataError, match=message):
        RecordsConfig(paths=(rows,), seq_len=SAMPLE - 2).rows(0)
    mixed, _ = RecordsConfig(paths=(documents, rows), seq_len=SAMPLE).rows(0)
    assert any(mixed[i]["segment_ids"].max() > 1 for i in range(4))
