import itertools

import numpy as np
import pytest
from checks import refused

from ttcd_jax.data.sources import synthetic_data
from ttcd_jax.data.synthetic.evidence import EvidenceConfig
from ttcd_jax.data.synthetic.rows import SyntheticRows

CONFIG = EvidenceConfig(num_facts=5, num_keys=7, num_values=8, num_fillers=3)
KEYS, VALUES, FILLERS = range(7), range(7, 15), range(15, 18)
TEACHER, STUDENT, REACH = 16, 4, 2 * 15  # windows; what two layers of the teacher's reach


def test_the_long_window_sees_one_value_at_a_key_and_the_short_one_none():
    assert (CONFIG.seq_len, CONFIG.vocab_size, CONFIG.fact_size) == (5 * (16 + 4) + 32, 18, 16)
    assert CONFIG.chance_accuracy == 1 / 8
    gaps, orders = set(), set()
    for row in SyntheticRows(CONFIG, seed=0, num_rows=60):
        assert {name: x.dtype for name, x in row.items()} == dict.fromkeys(row, np.int32) | {
            "loss_mask": bool
        }
        assert {x.shape for x in row.values()} == {(CONFIG.seq_len,)}
        tokens, value_of = row["tokens"].tolist(), {}
        at = [place for place, token in enumerate(tokens) if token in KEYS]
        np.testing.assert_array_equal(np.flatnonzero(row["loss_mask"]), at)
        assert not row["distance"][~row["loss_mask"]].any()
        for place in at:
            key, target = tokens[place], int(row["targets"][place])
            seen, short = (tokens[max(place + 1 - w, 0) : place + 1] for w in (TEACHER, STUDENT))
            assert not {*short} & {*VALUES}
            assert place + 1 == len(tokens) or tokens[place + 1] in FILLERS  # not its value
            stated = place - int(row["distance"][place])
            assert tokens[stated] == target
            if key in value_of:
                assert (target, stated) == value_of.pop(key)
                assert place - stated > REACH
                assert not {*tokens[max(place - REACH, 0) : place]} & {*VALUES}
            else:
                assert [x for x in seen if x in VALUES] == [target]
                assert [x for x in seen if x in KEYS] == [key]
                gaps.add(place - stated)
                assert target not in [value for value, _ in value_of.values()]
                value_of[key] = target, stated
        assert not value_of  # every key is asked for once
        orders.add(tuple(np.argsort([tokens[place] for place in at[5:]])))
    assert gaps == {*range(5, 15)}
    assert len(orders) > 30
    assert sum(token in VALUES for token in tokens) == 5


def test_row_is_a_pure_function_of_seed_and_index():
    (rows, found), (other, _) = CONFIG.rows(seed=3), CONFIG.rows(seed=4)
    assert found == {"kind": "evidence", "seed": 3}
    again = SyntheticRows(synthetic_data(CONFIG.to_dict()), seed=3, num_rows=9)
    for name, field in rows[8].items():
        np.testing.assert_array_equal(field, again[8][name])
    assert not np.array_equal(rows[8]["tokens"], rows[7]["tokens"])
    assert not np.array_equal(rows[8]["tokens"], other[8]["tokens"])
    with pytest.raises(IndexError):
        again[9]


def test_keys_values_and_fillers_are_drawn_evenly():
    rows = [*SyntheticRows(CONFIG, seed=2, num_rows=1000)]
    counts = np.bincount(np.stack([row["tokens"] for row in rows]).ravel(), minlength=18)
    fillers = 1000 * (CONFIG.seq_len - 15)
    # Five standard deviations of a count stay within these bounds.
    for part, mean in ((KEYS, 10000 / 7), (VALUES, 5000 / 8), (FILLERS, fillers / 3)):
        assert abs(counts[part] - mean).max() < 5 * np.sqrt(2 * mean)


def test_needles_are_facts_whose_questions_come_after_the_facts_of_others():
    rows = CONFIG.needles(seed=3, num_rows=5, num_needles=2, num_tokens=40)
    assert (rows.facts.shape, rows.haystack.shape) == ((5, 32), (5, 48))  # whole facts
    assert rows.questions.shape == (5, 2, 32 + 4)
    assert {*rows.questions[..., :-1].ravel().tolist()} <= {*FILLERS}
    for facts, haystack, questions, values in zip(*map(np.ndarray.tolist, rows), strict=True):
        keys = [question[-1] for question in questions]
        assert [x for x in facts if x in KEYS] == keys
        assert [x for x in facts if x in VALUES] == values
        assert not {*keys} & {*haystack}
        stated = itertools.batched((x for x in haystack if x not in FILLERS), 2)
        pairs = {*stated}
        assert len({key for _, key in pairs}) == len(pairs) > 1  # a key keeps its value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gap_min": 15}, "gap_min 15 is above gap_max 14: lower it"),
        ({"num_facts": 8}, "num_facts 8 is above num_keys 7: lower it"),
        ({"num_keys": 9, "num_facts": 9}, "num_facts 9 is above num_values 8: lower it"),
        ({"num_facts": 0}, "num_facts 0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, words):
    refused(words, lambda: CONFIG.replace(**changes))
