"""Rows of documents: packed as a stream, each apart, and best-fit as the textbook plans them."""

import numpy as np
import pytest
from checks import refused

from ttcd_jax.data import packing
from ttcd_jax.data.documents import Document
from ttcd_jax.data.packing import BestFitRows, DocumentRows, PackedRows, encode_documents
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.data.tokenizer import ByteTokenizer
from ttcd_jax.errors import DataError

TOKENIZER = ByteTokenizer()
BOS, EOS = TOKENIZER.bos_id, TOKENIZER.eos_id
DOCUMENTS = [Document(f"d{i}", bytes([97 + i]) * (3 * i + 1)) for i in range(12)]
SEQ_LEN = 16


def _packed(documents, tokenizer=TOKENIZER, **options):
    return PackedRows(encode_documents(documents, tokenizer), **options)


class OneToken(ByteTokenizer):
    """bos and eos are one token."""

    bos_id = ByteTokenizer.eos_id


@pytest.mark.parametrize("tokenizer", [TOKENIZER, OneToken()])
def test_packed_rows_divide_the_stream_of_permuted_documents(tokenizer):
    rows = _packed(DOCUMENTS, tokenizer, seq_len=SEQ_LEN, seed=3)
    assert rows.records.shards[0].dtype == np.uint16
    assert sorted(rows.order) == list(range(12)) != rows.order.tolist()
    other = _packed(DOCUMENTS, tokenizer, seq_len=SEQ_LEN, seed=4)
    assert other.order.tolist() != rows.order.tolist()
    stream = [
        (token, document, position)
        for document in rows.order.tolist()
        for position, token in enumerate([tokenizer.bos_id, *DOCUMENTS[document].text, EOS])
    ]
    assert len(rows) == (len(stream) - 1) // SEQ_LEN
    for number, row in enumerate(rows):
        begin, segment, position = number * SEQ_LEN, 0, 0
        for t in range(SEQ_LEN):
            (token, document, place), (target, following, _) = stream[begin + t : begin + t + 2]
            is_first = t == 0 or place == 0
            segment, position = segment + is_first, 0 if is_first else position + 1
            expected = (token, target, segment, position, document == following)
            assert tuple(row[name][t] for name in row) == expected


@pytest.mark.parametrize("kind", [PackedRows, BestFitRows, DocumentRows])
def test_fields_of_rows_and_their_indices(kind):
    options = {} if kind is DocumentRows else {"seed": 3}
    rows = kind(encode_documents(DOCUMENTS, TOKENIZER), seq_len=SEQ_LEN, **options)
    for row in (rows[0], rows[np.int64(1)]):
        assert all(value.shape == (SEQ_LEN,) for value in row.values())
        types = {name: str(value.dtype) for name, value in row.items()}
        integers = dict.fromkeys(["tokens", "targets", "segment_ids", "positions"], "int32")
        assert types == integers | {"loss_mask": "bool"}
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_a_row_takes_its_tokens_and_a_target():
    """Of 5 and of 8 tokens rows of 4 are one row; a rest without a target is dropped."""
    for text in (b"abcdef", b"abc"):
        assert len(_packed([Document("a", text)], seq_len=4, seed=0)) == 1
    for num_tokens, documents in ((5, [Document("a", b"abc")]), (0, [])):
        words = f"{num_tokens} tokens and a row takes 6 (seq_len 5"
        refused(words, _packed, documents, seq_len=5, seed=0, error=DataError)


def test_documents_apart():
    documents = [Document("long", b"abcdefgh"), Document("short", b"xy"), Document("bare", b"z")]
    source = DocumentRows(encode_documents(documents, TOKENIZER), seq_len=6, min_tokens=4)
    rows = {name: np.stack([row[name] for row in source]) for name in source[0]}
    first, second, short = [BOS, *b"abcde"], [*b"fgh", EOS, EOS, EOS], [BOS, *b"xy", EOS, EOS, EOS]
    assert rows["tokens"].tolist() == [first, second, short]
    assert rows["targets"].tolist() == [[*b"abcdef"], [*b"gh", *[EOS] * 4], [*b"xy", *[EOS] * 4]]
    assert rows["segment_ids"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert rows["positions"].tolist() == [list(range(6)), [0, 1, 2, 0, 0, 0], [0, 1, 2, 0, 0, 0]]
    np.testing.assert_array_equal(rows["loss_mask"], rows["segment_ids"] == 1)
    words = "none of 3 documents of the corpus has 11 tokens (longest: 10)"
    refused(words, DocumentRows, source.records, seq_len=6, min_tokens=11, error=DataError)


def test_documents_that_come_tokenized_are_framed_once_or_are_rows():
    framings = [[65, 66], [BOS, 65, 66], [65, 66, EOS], [BOS, 65, 66, EOS]]
    for dtype in (np.uint64, np.int32):
        documents = [Document("a", b"", np.array(ids, dtype)) for ids in framings]
        (ids,) = encode_documents(documents, TOKENIZER).shards
        assert ids.tolist() == [BOS, 65, 66, EOS] * len(framings)
        (ids,) = encode_documents(documents, TOKENIZER, samples_are_rows=True).shards
        assert ids.tolist() == np.concatenate(framings).tolist()
    foreign = Document("shard:7", b"", np.array([65, 258], np.uint32))
    words = "shard:7: token 258 at position 1 is outside"
    refused(words, encode_documents, [foreign], TOKENIZER, error=DataError)


def _records(sizes):
    """Documents of distinct tokens, so that a row tells what it holds."""
    starts = np.cumsum([0, *sizes])
    ids = np.arange(1, 1 + starts[-1])
    return TokenRecords([ids], starts, eos_id=0)


def _naive_rooms(histogram, seq_len):
    """The room left in each row after best-fit decreasing, one piece at a time."""
    rooms = []
    for length in np.flatnonzero(histogram)[::-1]:
        for _ in range(histogram[length]):
            fitting = [row for row, room in enumerate(rooms) if room >= length]
            if not fitting:
                fitting = [len(rooms)]
                rooms.append(seq_len)
            rooms[min(fitting, key=lambda row: rooms[row])] -= length
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(50))
def test_the_plan_is_best_fit_decreasing(seed):
    rng = np.random.default_rng(seed)
    histogram = rng.integers(10, size=SEQ_LEN + 1) * (rng.random(SEQ_LEN + 1) < rng.random())
    histogram[0] = 0
    placed, rooms = np.zeros_like(histogram), []
    for room, num_rows, pieces in packing.plan_rows(histogram, SEQ_LEN):
        for length, count in pieces:
            placed[length] += num_rows * count
        rooms += [SEQ_LEN - sum(length * count for length, count in pieces)] * num_rows
        assert room == rooms[-1]
    np.testing.assert_array_equal(placed, histogram)
    assert sorted(rooms) == _naive_rooms(histogram, SEQ_LEN)


def test_best_fit_rows_have_every_target_once_and_no_more_segments_than_needed():
    sizes = [1, 2, SEQ_LEN, SEQ_LEN + 1, SEQ_LEN + 2, 3 * SEQ_LEN + 1]
    sizes += np.random.default_rng(0).geometric(0.08, 300).tolist()
    starts = np.cumsum([1, *sizes])
    num_segments, all_targets = np.zeros(len(sizes), int), []
    for row in BestFitRows(_records(sizes), seq_len=SEQ_LEN, seed=1):
        np.testing.assert_array_equal(row["loss_mask"], row["segment_ids"] > 0)
        np.testing.assert_array_equal(row["tokens"][row["segment_ids"] == 0][1:], 0)
        assert np.all(np.diff(row["segment_ids"][row["loss_mask"]]) >= 0)
        for number in set(row["segment_ids"].tolist()) - {0}:
            tokens, targets, positions = (
                row[name][row["segment_ids"] == number]
                for name in ("tokens", "targets", "positions")
            )
            np.testing.assert_array_equal(positions, np.arange(tokens.size))
            np.testing.assert_array_equal(targets, tokens + 1)
            (document,) = set(np.searchsorted(starts, tokens, side="right") - 1)
            num_segments[document] += 1
            all_targets += targets.tolist()
    np.testing.assert_array_equal(num_segments, -(-(np.array(sizes) - 1) // SEQ_LEN))
    assert sorted(all_targets) == sorted({*range(1, starts[-1])} - {*starts.tolist()})


def test_a_seed_permutes_the_documents_of_one_length():
    def drawn(seed):
        rows = BestFitRows(_records([3, 4, 9] * 60), seq_len=SEQ_LEN, seed=seed)
        return np.stack([rows[i]["tokens"] for i in range(len(rows))])

    np.testing.assert_array_equal(drawn(1), drawn(1))
    assert drawn(1).shape == drawn(2).shape
    assert np.mean(drawn(1) != drawn(2)) > 0.5
