"""Megatron-LM's documents of token ids (corpora.py)."""

import corpora
import pytest

from ttcd_jax.data.corpus import stream_documents
from ttcd_jax.data.megatron import read_sequences
from ttcd_jax.data.records import open_records
from ttcd_jax.errors import DataError

DOCUMENTS = [[1, 2, 3], [], [4, 5, 6]]


@pytest.mark.parametrize("dtype", corpora.MEGATRON_TYPES)
def test_documents_of_one_sequence_or_several(tmp_path, dtype):
    path = corpora.megatron(tmp_path, dtype)
    assert [ids.tolist() for ids in read_sequences(path)] == DOCUMENTS
    documents = [document for _, document in stream_documents(corpora.text_file(path))]
    assert [document.name for document in documents] == ["a.idx:0", "a.idx:2"]


def test_documents_become_records_with_bos_and_eos(tmp_path):
    corpora.records(corpora.text_file(corpora.megatron(tmp_path)), tmp_path / "records")
    records = open_records(tmp_path / "records", "train")
    assert records.read(1, 0, 5).tolist() == [256, 4, 5, 6, 257]


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    corpus = corpora.text_file(corpora.megatron(tmp_path, sequences=[[1], [2], [3], [999]]))
    with pytest.raises(DataError, match=r"a\.idx:2: .*999"):
        corpora.records(corpus, tmp_path / "records")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"MMIDIDX\0\1"}, r"a\.idx begins b'MMIDIDX.x00.x01', 1, 8; read"),
        ({"version": 2}, r"a\.idx begins b'MMIDIDX.x00.x00', 2, 8; read"),
        ({"code": 7}, r"x00', 1, 7; .*, 1, \[1, 2, 3, 4, 5, 8\]"),
        ({"counts": (2**60, 2**60)}, "115 bytes|114 bytes; 1152921504606846976 sequences"),
        ({"counts": (5, 4)}, "has 114 bytes; 5 sequences and 4 documents take 126"),
        ({"starts": [0, 2, 2, 3]}, r"a\.bin has 6 ids in 4 sequences, its documents 4 in 3"),
        ({"starts": [1, 2, 2, 4]}, r"does not fit .*a\.bin at document 0"),
        ({"starts": [0, 3, 2, 4]}, "does not fit .* at document 1"),
        ({"starts": [0, 2**62, -(2**62), 4]}, "does not fit .* at document 0"),
        ({"starts": [-4, 2, 2, 4]}, "does not fit .* at document 0"),
        ({"starts": [0, -1, 2, 4]}, "does not fit .* at document 0"),
        ({"sizes": [3, -1, 2, 2]}, "does not fit .* at document 0"),
        ({"sizes": [3, 0, 1, 3]}, "does not fit .* at document 2"),
        ({"sizes": [3, 0, 1, 1]}, r"a\.bin has 6 ids in 4 sequences, its documents 5 in 4"),
        ({"offsets": [0, 6, 8, 10]}, "does not fit .* at document 2"),
        ({"code": 4}, "does not fit .* at document 2"),
    ],
)
def test_what_an_index_may_not_say(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        list(read_sequences(corpora.megatron(tmp_path, **changes)))
