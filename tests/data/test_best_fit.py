"""Best-fit packing: the plan against the textbook's algorithm, and the rows that follow it."""

import numpy as np
import pytest

from ttcd_jax.data.best_fit import BestFitRows, plan_rows
from ttcd_jax.data.packing import PackedRows
from ttcd_jax.data.records import TokenRecords
from ttcd_jax.errors import DataError

SEQ_LEN = 16
EOS = 0


def _records(sizes, base=1):
    """Documents of distinct tokens, so that a row tells what it holds."""
    starts = np.cumsum([0, *sizes])
    ids = np.arange(base, base + starts[-1])
    return TokenRecords([ids], starts, vocab_size=2**31, eos_id=EOS)


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
    kinds = plan_rows(histogram, SEQ_LEN)
    placed = np.zeros_like(histogram)
    rooms = []
    for num_rows, pieces in kinds:
        for length, count in pieces:
            placed[length] += num_rows * count
        rooms += [SEQ_LEN - sum(length * count for length, count in pieces)] * num_rows
    np.testing.assert_array_equal(placed, histogram)
    assert sorted(rooms) == _naive_rooms(histogram, SEQ_LEN)


@pytest.fixture(scope="module")
def sizes():
    rng = np.random.default_rng(0)
    return [1, 2, SEQ_LEN, SEQ_LEN + 1, SEQ_LEN + 2, 3 * SEQ_LEN + 1, *rng.geometric(0.08, 300)]


def test_every_target_comes_once_beside_its_input(sizes):
    rows = BestFitRows(_records(sizes), seq_len=SEQ_LEN, seed=1)
    inputs = np.concatenate([row["tokens"][row["loss_mask"]] for row in rows])
    targets = np.concatenate([row["targets"][row["loss_mask"]] for row in rows])
    np.testing.assert_array_equal(targets, inputs + 1)
    begins = np.cumsum([1, *sizes])[:-1]
    expected = np.setdiff1d(np.arange(1, 1 + sum(sizes)), begins)
    np.testing.assert_array_equal(np.sort(targets), expected)


def test_a_document_that_fits_is_one_segment(sizes):
    starts = np.cumsum([1, *sizes])
    num_segments = np.zeros(len(sizes), int)
    for row in BestFitRows(_records(sizes), seq_len=SEQ_LEN, seed=1):
        assert {name: x.shape for name, x in row.items()} == dict.fromkeys(row, (SEQ_LEN,))
        np.testing.assert_array_equal(row["loss_mask"], row["segment_ids"] > 0)
        np.testing.assert_array_equal(row["tokens"][row["segment_ids"] == 0][1:], EOS)
        assert np.all(np.diff(row["segment_ids"][row["loss_mask"]]) >= 0)
        for number in set(row["segment_ids"].tolist()) - {0}:
            tokens = row["tokens"][row["segment_ids"] == number]
            documents = set(np.searchsorted(starts, tokens, side="right") - 1)
            assert len(documents) == 1
            num_segments[documents.pop()] += 1
            positions = row["positions"][row["segment_ids"] == number]
            np.testing.assert_array_equal(positions, np.arange(tokens.size))
    np.testing.assert_array_equal(num_segments, -(-(np.array(sizes) - 1) // SEQ_LEN))


def test_a_seed_permutes_the_documents_of_one_length(sizes):
    def drawn(seed):
        rows = BestFitRows(_records(sizes), seq_len=SEQ_LEN, seed=seed)
        return np.stack([rows[i]["tokens"] for i in range(len(rows))])

    np.testing.assert_array_equal(drawn(1), drawn(1))
    assert drawn(1).shape == drawn(2).shape
    assert np.mean(drawn(1) != drawn(2)) > 0.5


def test_little_is_padding_where_lengths_have_a_long_tail():
    lengths = 2 + np.random.default_rng(0).lognormal(6.2, 1.4, 20_000).astype(int)
    rows = BestFitRows(_records(lengths), seq_len=2048, seed=0)
    assert len(rows) * 2048 < 1.0002 * (lengths.sum() - lengths.size)
    cut = PackedRows(_records(lengths), seq_len=2048, seed=0)
    begins_whole = np.diff(cut.starts) <= 2048
    is_cut = cut.starts[:-1] // 2048 != (cut.starts[1:] - 2) // 2048
    assert np.mean(is_cut[begins_whole]) > 0.2  # the other packing cuts a fourth of those that fit


def test_documents_without_a_target():
    with pytest.raises(DataError, match=r"the corpus has no document of 2 tokens; add text"):
        BestFitRows(_records([1, 1]), seq_len=SEQ_LEN, seed=0)
    rows = BestFitRows(_records([2]), seq_len=SEQ_LEN, seed=0)
    assert len(rows) == 1
    for index in (-1, 1):
        with pytest.raises(IndexError):
            rows[index]
