"""Drawn rows: the rules of recall and of evidence, what is drawn evenly, needles, refusals."""

import itertools

import numpy as np
import pytest
from checks import refused

from ttcd_jax.data.sources import synthetic_data
from ttcd_jax.data.synthetic import EvidenceConfig, RecallConfig, SyntheticRows

RECALL = RecallConfig(num_slots=12, num_keys=7, num_values=8)
EVIDENCE = EvidenceConfig(num_facts=5, num_keys=7, num_values=8, num_fillers=3)
KEYS, VALUES, FILLERS = range(7), range(7, 15), range(15, 18)
TEACHER, STUDENT, REACH = 16, 4, 2 * 15  # windows; what two layers of the teacher's reach


@pytest.mark.parametrize("config", [RECALL, EVIDENCE])
def test_a_row_is_a_pure_function_of_seed_and_index(config):
    (rows, found), (other, _) = config.rows(seed=3), config.rows(seed=4)
    assert found == {"kind": config.kind, "seed": 3}
    again = SyntheticRows(synthetic_data(config.to_dict()), seed=3, num_rows=9)
    for name, field in rows[8].items():
        np.testing.assert_array_equal(field, again[8][name])
        assert field.shape == (config.seq_len,)
        assert field.dtype == (bool if name == "loss_mask" else np.int32)
    np.testing.assert_array_equal(rows[8]["positions"], np.arange(config.seq_len))
    assert not np.array_equal(rows[8]["tokens"], rows[7]["tokens"])
    assert not np.array_equal(rows[8]["tokens"], other[8]["tokens"])
    with pytest.raises(IndexError):
        again[9]


def test_rows_obey_the_rules_of_recall():
    assert (RECALL.seq_len, RECALL.vocab_size) == (23, 15)
    for row in SyntheticRows(RECALL, seed=0, num_rows=50):
        sequence = [*row["tokens"].tolist(), int(row["targets"][-1])]
        assert len(sequence) == 2 * RECALL.num_slots
        assert sequence[1:] == row["targets"].tolist()
        seen = {}
        for slot, (key, value) in enumerate(itertools.batched(sequence, 2)):
            assert key in KEYS
            assert value in VALUES
            position = 2 * slot
            if key in seen:
                assert seen[key][0] == value
                assert row["distance"][position] == position - seen[key][1]
            assert bool(row["loss_mask"][position]) is (key in seen)
            seen[key] = (value, position + 1)
        assert not row["loss_mask"][1::2].any()
        assert not row["distance"][1::2].any()


def test_the_long_window_sees_one_value_at_a_key_and_the_short_one_none():
    assert (EVIDENCE.seq_len, EVIDENCE.vocab_size, EVIDENCE.fact_size) == (132, 18, 16)
    gaps, orders = set(), set()
    for row in SyntheticRows(EVIDENCE, seed=0, num_rows=60):
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


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (RECALL, {KEYS: 12, VALUES: 11}),  # the last value is only a target
        (EVIDENCE, {KEYS: 10, VALUES: 5, FILLERS: 117}),
    ],
)
def test_keys_values_and_fillers_are_drawn_evenly(config, sizes):
    tokens = np.stack([row["tokens"] for row in SyntheticRows(config, seed=2, num_rows=2000)])
    for part, size in sizes.items():
        counts = np.array([(tokens == token).sum() for token in part])
        assert counts.sum() == 2000 * size
        # Five standard deviations of a count stay within these bounds.
        assert abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())


def _plain(fields):
    return zip(*map(np.ndarray.tolist, fields), strict=True)


def test_needles_of_recall_are_shown_once_and_the_haystack_has_other_keys():
    rows = RECALL.needles(seed=3, num_rows=5, num_needles=2, num_tokens=40)
    assert (rows.facts.shape, rows.haystack.shape) == ((5, 4), (5, 40))
    for facts, haystack, questions, values in _plain(rows):
        keys = [key for (key,) in questions]
        assert [*itertools.batched(facts, 2)] == [*zip(keys, values, strict=True)]
        pairs = {*itertools.batched(haystack, 2)}
        assert not {*keys} & {key for key, _ in pairs}
        assert len({key for key, _ in pairs}) == len(pairs)  # a key keeps its value
        assert {value for _, value in pairs} <= {*VALUES}
    assert len({row.tobytes() for row in rows.questions}) > 1
    options = {"seed": 3, "num_rows": 1, "num_needles": 7, "num_tokens": 8}
    refused("num_keys 7 must be more than the 7 needles", RECALL.needles, **options)


def test_needles_of_evidence_are_asked_for_after_the_facts_of_others():
    rows = EVIDENCE.needles(seed=3, num_rows=5, num_needles=2, num_tokens=40)
    assert (rows.facts.shape, rows.haystack.shape) == ((5, 32), (5, 48))  # whole facts
    assert rows.questions.shape == (5, 2, 32 + 4)
    assert {*rows.questions[..., :-1].ravel().tolist()} <= {*FILLERS}
    for facts, haystack, questions, values in _plain(rows):
        keys = [question[-1] for question in questions]
        assert [x for x in facts if x in KEYS] == keys
        assert [x for x in facts if x in VALUES] == values
        assert not {*keys} & {*haystack}
        pairs = {*itertools.batched((x for x in haystack if x not in FILLERS), 2)}
        assert len({key for _, key in pairs}) == len(pairs) > 1  # a key keeps its value


def test_sizes_that_do_not_fit_are_refused():
    refused("gap_min 15 is above gap_max 14: lower it", EVIDENCE.replace, gap_min=15)
    refused("num_facts 8 is above num_keys 7: lower it", EVIDENCE.replace, num_facts=8)
    words = "num_facts 9 is above num_values 8: lower it"
    refused(words, EVIDENCE.replace, num_keys=9, num_facts=9)
