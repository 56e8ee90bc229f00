import numpy as np
import pytest

from ttcd_jax.data.documents import Document
from ttcd_jax.data.packing import DocumentRows, PackedRows, encode_documents
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError

TOKENIZER = ByteTokenizer()
DOCUMENTS = [Document(f"d{i}", bytes([97 + i]) * (3 * i + 1)) for i in range(12)]
SEQ_LEN = 16


def _packed(documents, tokenizer=TOKENIZER, **options):
    return PackedRows(encode_documents(documents, tokenizer), **options)


@pytest.fixture
def rows():
    return _packed(DOCUMENTS, seq_len=SEQ_LEN, seed=3)


def _stream(rows):
    """Every token of the documents in the order of the rows, those behind the last row included."""
    records = rows.records
    parts = [records.read(d, 0, records.sizes[d]).tolist() for d in rows.order]
    return [token for part in parts for token in part]


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
    texts = _documents_of(_stream(rows))
    assert sorted(texts) == sorted(document.text for document in DOCUMENTS)
    assert texts != [document.text for document in DOCUMENTS]
    other = _packed(DOCUMENTS, seq_len=SEQ_LEN, seed=4)
    assert texts != _documents_of(_stream(other))
    assert rows.records.shards[0].dtype == np.uint16


def test_rows_tile_the_stream(rows):
    stream = _stream(rows)
    assert len(rows) == (len(stream) - 1) // SEQ_LEN
    tokens = np.concatenate([rows[r]["tokens"] for r in range(len(rows))])
    targets = np.concatenate([rows[r]["targets"] for r in range(len(rows))])
    np.testing.assert_array_equal(tokens, stream[: tokens.size])
    np.testing.assert_array_equal(targets, stream[1 : tokens.size + 1])
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
    rows = _packed([Document("a", b"ab"), Document("b", b"cd")], tokenizer, seq_len=7, seed=0)
    assert rows[0]["loss_mask"].tolist() == [True, True, True, False, True, True, True]
    assert rows[0]["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2]


def test_a_row_takes_its_tokens_and_a_target():
    """Of 5 and of 8 tokens rows of 4 are one row; a rest without a target is dropped."""
    assert len(_packed([Document("a", b"abcdef")], seq_len=4, seed=0)) == 1
    rows = _packed([Document("a", b"abc")], seq_len=4, seed=0)
    assert len(rows) == 1
    assert rows[0]["targets"].tolist() == [97, 98, 99, TOKENIZER.eos_id]
    for num_tokens, documents in ((5, [Document("a", b"abc")]), (0, [])):
        with pytest.raises(DataError, match=rf"{num_tokens} tokens and a row takes 6 \(seq_len 5"):
            _packed(documents, seq_len=5, seed=0)


def test_documents_apart():
    documents = [Document("long", b"abcdefgh"), Document("short", b"xy"), Document("bare", b"z")]
    source = DocumentRows(encode_documents(documents, TOKENIZER), seq_len=6, min_tokens=4)
    rows = {name: np.stack([row[name] for row in source]) for name in source[0]}
    bos, eos = TOKENIZER.bos_id, TOKENIZER.eos_id
    first, second, short = [bos, *b"abcde"], [*b"fgh", eos, eos, eos], [bos, *b"xy", eos, eos, eos]
    assert rows["tokens"].tolist() == [first, second, short]
    assert rows["targets"].tolist() == [[*b"abcdef"], [*b"gh", *[eos] * 4], [*b"xy", *[eos] * 4]]
    assert rows["segment_ids"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert rows["positions"].tolist() == [list(range(6)), [0, 1, 2, 0, 0, 0], [0, 1, 2, 0, 0, 0]]
    np.testing.assert_array_equal(rows["loss_mask"], rows["segment_ids"] == 1)
    with pytest.raises(IndexError):
        source[len(source)]
    packed = _packed(documents, seq_len=6, seed=0)[0]
    assert {name: value.dtype for name, value in rows.items()} == {
        name: value.dtype for name, value in packed.items()
    }


def test_no_document_long_enough():
    records = encode_documents([Document("a", b"abc")], TOKENIZER)
    with pytest.raises(DataError, match=r"none of 1 documents has 9 tokens \(longest: 5\)"):
        DocumentRows(records, seq_len=6, min_tokens=9)


def test_documents_that_come_tokenized_are_framed_once():
    bos, eos = TOKENIZER.bos_id, TOKENIZER.eos_id
    framings = [[65, 66], [bos, 65, 66], [65, 66, eos], [bos, 65, 66, eos]]
    for dtype in (np.uint64, np.int32):
        documents = [Document("a", b"", np.array(ids, dtype)) for ids in framings]
        records = encode_documents(documents, TOKENIZER)
        assert records.shards[0].tolist() == [bos, 65, 66, eos] * len(framings)
    foreign = Document("shard:7", b"", np.array([65, 258], np.uint32))
    with pytest.raises(DataError, match="shard:7: token 258 at position 1 is outside"):
        encode_documents([foreign], TOKENIZER)
