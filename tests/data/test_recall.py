import numpy as np
import pytest

from ttcd_jax.data.pipeline import Batches
from ttcd_jax.data.synthetic.recall import RecallConfig, RecallRows
from ttcd_jax.errors import UserError

CONFIG = RecallConfig(num_pairs=6, num_keys=20, num_values=8)


@pytest.fixture
def rows():
    return RecallRows(CONFIG, seed=0, num_rows=50)


def test_rows_obey_the_rules_of_the_task(rows):
    for row in rows:
        sequence = [*row["tokens"].tolist(), int(row["targets"][-1])]
        assert len(sequence) == 4 * CONFIG.num_pairs
        assert sequence[1:] == row["targets"].tolist()
        keys, values = sequence[0::2], sequence[1::2]
        assert all(0 <= key < CONFIG.num_keys for key in keys)
        assert all(CONFIG.num_keys <= value < CONFIG.vocab_size for value in values)
        written = dict(zip(keys[:6], values[:6], strict=True))
        asked = dict(zip(keys[6:], values[6:], strict=True))
        assert len(written) == 6
        assert asked == written


def test_mask_and_distance_mark_the_queries(rows):
    for row in rows:
        queries = np.arange(2 * CONFIG.num_pairs, CONFIG.seq_len, 2)
        np.testing.assert_array_equal(np.flatnonzero(row["loss_mask"]), queries)
        np.testing.assert_array_equal(row["distance"] > 0, row["loss_mask"])
        value_places = queries - row["distance"][queries]
        tokens = row["tokens"]
        np.testing.assert_array_equal(tokens[value_places], row["targets"][queries])
        np.testing.assert_array_equal(tokens[value_places - 1], tokens[queries])
        assert (value_places < 2 * CONFIG.num_pairs).all()


def test_fields(rows):
    row = rows[0]
    assert all(value.shape == (CONFIG.seq_len,) for value in row.values())
    assert row["loss_mask"].dtype == bool
    assert all(row[name].dtype == np.int32 for name in row if name != "loss_mask")
    assert (row["segment_ids"] == 1).all()
    np.testing.assert_array_equal(row["positions"], np.arange(CONFIG.seq_len))


def test_row_is_a_pure_function_of_seed_and_index(rows):
    again = RecallRows(CONFIG, seed=0, num_rows=9)
    other = RecallRows(CONFIG, seed=1, num_rows=9)
    np.testing.assert_array_equal(rows[7]["tokens"], again[7]["tokens"])
    assert not np.array_equal(rows[7]["tokens"], rows[8]["tokens"])
    assert not np.array_equal(rows[7]["tokens"], other[7]["tokens"])
    with pytest.raises(IndexError):
        again[9]


def test_values_orders_and_keys_are_drawn_evenly():
    rows = list(RecallRows(CONFIG, seed=2, num_rows=2000))
    tokens = np.stack([row["tokens"] for row in rows])
    values = np.bincount(tokens[:, 1:12:2].ravel() - CONFIG.num_keys, minlength=8)
    keys = np.bincount(tokens[:, 0:12:2].ravel(), minlength=20)
    first_distance = np.bincount([row["distance"][12] for row in rows])[1::2]
    # 2000 rows of 6 draws: five standard deviations of a count stay within these bounds
    assert abs(values - 1500).max() < 190
    assert abs(keys - 600).max() < 125
    assert abs(first_distance - 2000 / 6).max() < 85


def test_sizes():
    assert (CONFIG.seq_len, CONFIG.vocab_size, CONFIG.chance_accuracy) == (23, 28, 0.125)
    smallest = RecallConfig(num_pairs=1, num_keys=1, num_values=1)
    row = RecallRows(smallest, seed=0, num_rows=1)[0]
    assert row["tokens"].tolist() == [0, 1, 0]
    assert row["distance"].tolist() == [0, 0, 1]


def test_batches_keep_the_order_of_a_generated_source():
    rows = RecallRows(CONFIG, seed=0, num_rows=10**9)
    batch = Batches(rows, batch_size=4, seed=0, is_shuffled=False).at(1000)
    np.testing.assert_array_equal(batch["distance"][2], rows[4002]["distance"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_keys": 5}, "num_keys 5 is less than num_pairs 6"),
        ({"num_pairs": 0}, "num_pairs 0 and num_values 8"),
        ({"num_values": 0}, "num_pairs 6 and num_values 0"),
    ],
)
def test_errors(fields, message):
    with pytest.raises(UserError, match=message):
        CONFIG.replace(**fields)
