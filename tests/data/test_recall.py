import numpy as np
import pytest
from checks import refused

from ttcd_jax.data.synthetic.recall import RecallConfig
from ttcd_jax.data.synthetic.rows import SyntheticRows

CONFIG = RecallConfig(num_slots=12, num_keys=7, num_values=8)


def test_rows_obey_the_rules_of_the_task():
    assert (CONFIG.seq_len, CONFIG.vocab_size, CONFIG.chance_accuracy) == (23, 15, 0.125)
    for row in SyntheticRows(CONFIG, seed=0, num_rows=50):
        assert all(value.shape == (CONFIG.seq_len,) for value in row.values())
        types = {name: value.dtype for name, value in row.items()}
        assert types == dict.fromkeys(row, np.int32) | {"loss_mask": bool}
        np.testing.assert_array_equal(row["positions"], np.arange(CONFIG.seq_len))
        sequence = [*row["tokens"].tolist(), int(row["targets"][-1])]
        assert len(sequence) == 2 * CONFIG.num_slots
        assert sequence[1:] == row["targets"].tolist()
        seen = {}
        for slot, (key, value) in enumerate(zip(sequence[0::2], sequence[1::2], strict=True)):
            assert 0 <= key < CONFIG.num_keys <= value < CONFIG.vocab_size
            position = 2 * slot
            if key in seen:
                assert seen[key][0] == value
                assert row["distance"][position] == position - seen[key][1]
            assert bool(row["loss_mask"][position]) is (key in seen)
            seen[key] = (value, position + 1)
        assert not row["loss_mask"][1::2].any()
        assert not row["distance"][1::2].any()


def test_row_is_a_pure_function_of_seed_and_index():
    rows, again, other = (SyntheticRows(CONFIG, seed=seed, num_rows=9) for seed in (0, 0, 1))
    np.testing.assert_array_equal(rows[7]["tokens"], again[7]["tokens"])
    assert not np.array_equal(rows[7]["tokens"], rows[8]["tokens"])
    assert not np.array_equal(rows[7]["tokens"], other[7]["tokens"])
    with pytest.raises(IndexError):
        again[9]


def test_keys_and_values_are_drawn_evenly():
    rows = list(SyntheticRows(CONFIG, seed=2, num_rows=2000))
    tokens = np.stack([row["tokens"] for row in rows])
    keys = np.bincount(tokens[:, 0::2].ravel(), minlength=7)
    values = np.bincount(tokens[:, 1] - CONFIG.num_keys, minlength=8)
    # Five standard deviations of a count stay within these bounds.
    assert abs(keys - 24000 / 7).max() < 5 * np.sqrt(24000 / 7)
    assert abs(values - 250).max() < 5 * np.sqrt(250)


def test_needles_are_shown_once_and_the_haystack_has_other_keys():
    rows = CONFIG.needles(seed=3, num_rows=5, num_needles=2, num_tokens=40)
    assert (rows.facts.shape, rows.haystack.shape) == ((5, 4), (5, 40))
    keys = rows.questions[..., 0]
    np.testing.assert_array_equal(rows.facts, np.stack([keys, rows.values], 2).reshape(5, 4))
    for pairs, haystack in zip(rows.facts.tolist(), rows.haystack.tolist(), strict=True):
        assert len(set(pairs[0::2])) == 2
        assert not set(pairs[0::2]) & set(haystack[0::2])
        values = dict(zip(haystack[0::2], haystack[1::2], strict=True))
        assert haystack[1::2] == [values[key] for key in haystack[0::2]]  # a key keeps its value
        assert all(CONFIG.num_keys <= value < CONFIG.vocab_size for value in haystack[1::2])
    assert len({row.tobytes() for row in keys}) > 1
    options = {"seed": 3, "num_rows": 1, "num_needles": 7, "num_tokens": 8}
    refused("num_keys 7 must be more than the 7 needles", CONFIG.needles, **options)
