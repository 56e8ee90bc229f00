import numpy as np
import pytest

from ttcd_jax.data.corpus import Document
from ttcd_jax.data.packing import PackedRows, document_rows
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError

TOKENIZER = ByteTokenizer()
DOCUMENTS = [Document(f"d{i}", bytes([97 + i]) * (3 * i + 1)) for i in range(12)]
SEQ_LEN = 16


@pytest.fixture
def rows():
    return PackedRows(DOCUMENTS, TOKENIZER, seq_len=SEQ_LEN, seed=3)


def _documents_of(stream):
    """Texts between bos and eos, in order, by reading tokens one at a time."""
    texts, text = [], None
    for token in stream:
        if token == TOKENIZER.bos_id:
            assert text is None
            text = []
        elif token == TOKENIZER.eos_id:
            texts.append(bytes(text))
            text = None
        else:
            text.append(token)
    return texts


def test_stream_is_the_documents_permuted(rows):
    texts = _documents_of(rows.stream.tolist())
    assert sorted(texts) == sorted(document.text for document in DOCUMENTS)
    assert texts != [document.text for document in DOCUMENTS]
    other = PackedRows(DOCUMENTS, TOKENIZER, seq_len=SEQ_LEN, seed=4)
    assert texts != _documents_of(other.stream.tolist())
    assert rows.stream.dtype == np.uint16


def test_rows_tile_the_stream(rows):
    assert len(rows) == (rows.stream.size - 1) // SEQ_LEN
    tokens = np.concatenate([rows[r]["tokens"] for r in range(len(rows))])
    targets = np.concatenate([rows[r]["targets"] for r in range(len(rows))])
    np.testing.assert_array_equal(tokens, rows.stream[: tokens.size])
    np.testing.assert_array_equal(targets, rows.stream[1 : tokens.size + 1])
    with pytest.raises(IndexError):
        rows[len(rows)]
    with pytest.raises(IndexError):
        rows[-1]


def test_segments_positions_and_mask_follow_the_documents(rows):
    for row in rows:
        segment, position = 0, 0
        for t in range(SEQ_LEN):
            if t == 0 or row["tokens"][t] == TOKENIZER.bos_id:
                segment, position = segment + 1, 0
            assert row["segment_ids"][t] == segment
            assert row["positions"][t] == position
            assert row["loss_mask"][t] == (row["targets"][t] != TOKENIZER.bos_id)
            position += 1


def test_field_shapes_and_types(rows):
    for row in (rows[0], rows[np.int64(1)]):
        assert all(value.shape == (SEQ_LEN,) for value in row.values())
        types = {name: str(value.dtype) for name, value in row.items()}
        integers = dict.fromkeys(["tokens", "targets", "segment_ids", "positions"], "int32")
        assert types == integers | {"loss_mask": "bool"}


def test_mask_knows_documents_where_bos_and_eos_are_one_token():
    tokenizer = ByteTokenizer()
    tokenizer.bos_id = tokenizer.eos_id
    rows = PackedRows([Document("a", b"ab"), Document("b", b"cd")], tokenizer, seq_len=7, seed=0)
    assert rows[0]["loss_mask"].tolist() == [True, True, True, False, True, True, True]
    assert rows[0]["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2]


def test_stream_of_exactly_one_row():
    rows = PackedRows([Document("a", b"abc")], TOKENIZER, seq_len=4, seed=0)
    assert len(rows) == 1
    assert rows[0]["targets"].tolist() == [97, 98, 99, TOKENIZER.eos_id]


def test_last_row_without_a_target_is_dropped():
    rows = PackedRows([Document("a", b"abcdef")], TOKENIZER, seq_len=4, seed=0)
    assert rows.stream.size == 8
    assert len(rows) == 1


@pytest.mark.parametrize("documents", [[Document("a", b"abc")], []])
def test_corpus_shorter_than_a_row(documents):
    num_tokens = sum(len(document.text) + 2 for document in documents)
    with pytest.raises(DataError, match=rf"has {num_tokens} tokens and a row takes 6 \(seq_len 5"):
        PackedRows(documents, TOKENIZER, seq_len=5, seed=0)


def test_documents_apart():
    documents = [Document("long", b"abcdefgh"), Document("short", b"xy"), Document("bare", b"z")]
    rows = document_rows(documents, TOKENIZER, seq_len=6, min_tokens=4)
    bos, eos = TOKENIZER.bos_id, TOKENIZER.eos_id
    first, second, short = [bos, *b"abcde"], [*b"fgh", eos, eos, eos], [bos, *b"xy", eos, eos, eos]
    assert rows["tokens"].tolist() == [first, second, short]
    assert rows["targets"].tolist() == [[*b"abcdef"], [*b"gh", *[eos] * 4], [*b"xy", *[eos] * 4]]
    assert rows["segment_ids"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert rows["positions"].tolist() == [list(range(6)), [0, 1, 2, 0, 0, 0], [0, 1, 2, 0, 0, 0]]
    np.testing.assert_array_equal(rows["loss_mask"], rows["segment_ids"] == 1)
    packed = PackedRows(documents, TOKENIZER, seq_len=6, seed=0)[0]
    assert {name: value.dtype for name, value in rows.items()} == {
        name: value.dtype for name, value in packed.items()
    }


def test_no_document_long_enough():
    with pytest.raises(DataError, match=r"none of 1 documents has 9 tokens \(longest: 5\)"):
        document_rows([Document("a", b"abc")], TOKENIZER, seq_len=6, min_tokens=9)
