"""The MAD tasks: rules of every row, streams, sizes; parity has the published rows bit by bit."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from mad_rules import check

from experiments.mad.tasks.config import BASELINES, MADConfig
from experiments.mad.tasks.draws import Draws
from experiments.mad.tasks.fuzzy_in_context_recall import motif_tokens
from experiments.mad.tasks.instances import instances
from experiments.mad.tasks.rows import Rows
from experiments.mad.tasks.settings import TASKS
from experiments.parity.golden import Golden
from experiments.parity.mad import task_config
from ttcd_jax.errors import UserError

GOLDEN = Path(__file__).parents[2] / "golden"
SPLITS = {"train": True, "test": False}


@pytest.mark.parametrize("task", TASKS)
def test_published_rows_obey_the_rules_and_the_first_configuration_is_the_baseline(task):
    """Parity compares our rows with these; the rules are checked on both."""
    golden = Golden(GOLDEN / f"mad_{task.replace('-', '_')}.npz")
    for source in golden.info["configs"]:
        name, config = source["name"], task_config(source)
        assert config == BASELINES[task] or name != "c0"
        for split, is_training in SPLITS.items():
            parts = (golden.arrays[f"{name}.{split}.{part}"] for part in Rows._fields)
            rows = Rows(*(part.astype(np.int32) for part in parts))
            check(config, rows, seed=source["seed"], is_training=is_training)
        splits = instances(config, seed=source["seed"], num_train=2, num_test=2)
        assert {x.dtype for rows in splits for x in rows} == {np.dtype(np.int32)}


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_a_pure_function_of_seed_and_numbers(task):
    config = BASELINES[task]
    first = instances(config, seed=3, num_train=9, num_test=5)
    again = instances(config, seed=3, num_train=9, num_test=5)
    np.testing.assert_equal(first, again)
    prefix = instances(config, seed=3, num_train=4, num_test=0)
    np.testing.assert_array_equal(prefix.train.inputs, first.train.inputs[:4])
    assert prefix.test.inputs.shape == prefix.test.targets.shape == (0, config.num_positions)
    check(config, prefix.test, seed=3, is_training=False)
    other = instances(config, seed=4, num_train=9, num_test=5)
    for ours, others in zip(first, other, strict=True):
        assert not (ours.inputs == others.inputs).all(1).any()
    check(config, other.train, seed=4, is_training=True)
    check(config, other.test, seed=4, is_training=False)


def test_row_of_noise_alone_is_drawn_anew():
    # Without the guard about one row in eight would have no key to ask for.
    config = MADConfig(
        task="noisy-in-context-recall", vocab_size=8, seq_len=10, frac_noise=0.9, noise_vocab_size=2
    )
    splits = instances(config, seed=0, num_train=300, num_test=100)
    check(config, splits.train, seed=0, is_training=True)
    check(config, splits.test, seed=0, is_training=False)


def test_numbers_below_n_are_those_of_the_generator():
    ours, theirs = Draws(7), np.random.default_rng(7)
    # Large n draw anew now and then; permutations and random() share the stream.
    for n in [1, 2, 3, 8, 1000, 2**31 + 1, 3 * 2**30, 2**32 - 1] * 50:
        assert ours.below(n) == theirs.integers(0, n)
        assert ours.generator.random() == theirs.random()
        np.testing.assert_array_equal(ours.generator.permutation(5), theirs.permutation(5))


@pytest.mark.parametrize(("num_tokens", "length"), [(5, 1), (5, 3), (4, 4)])
def test_motifs_are_in_the_order_of_itertools(num_tokens, length):
    motifs = [motif_tokens((length, i), num_tokens) for i in range(math.perm(num_tokens, length))]
    assert motifs == list(itertools.permutations(range(num_tokens), length))


@pytest.mark.parametrize(
    ("task", "sizes", "message"),
    [
        ("in-context-recall", {"vocab_size": 1}, "vocab_size 1 .*leaves 1 ids"),
        ("in-context-recall", {"seq_len": 127}, "seq_len 127 is odd"),
        ("in-context-recall", {"seq_len": 2}, "seq_len 2 holds no pair"),
        ("in-context-recall", {"frac_noise": 0.2}, "frac_noise 0.2 is not read"),
        ("noisy-in-context-recall", {"frac_noise": 1.0}, "frac_noise 1.0 must be between"),
        ("noisy-in-context-recall", {"noise_vocab_size": 0}, "noise_vocab_size 0"),
        ("noisy-in-context-recall", {"noise_vocab_size": 31}, "leaves 1 ids"),
        ("fuzzy-in-context-recall", {"k_motif_size": 8}, "7 key tokens, k_motif_size 8 needs 8"),
        ("fuzzy-in-context-recall", {"v_motif_size": 9}, "8 value tokens, v_motif_size 9 needs 9"),
        ("fuzzy-in-context-recall", {"v_motif_size": 0}, "v_motif_size 0 .*take 1 or more"),
        ("fuzzy-in-context-recall", {"k_motif_size": -1}, "k_motif_size -1 .*take 1 or more"),
        ("fuzzy-in-context-recall", {"vocab_size": 1}, "vocab_size 1 has 0 key tokens"),
        ("fuzzy-in-context-recall", {"seq_len": 12}, "seq_len 12 .* pairs of 6 tokens; take 13"),
        (
            "fuzzy-in-context-recall",
            {"vocab_size": 256, "k_motif_size": 4},
            "127 key tokens, so 248031000 motifs",
        ),
        ("memorization", {"vocab_size": 2}, "vocab_size 2 .*leaves 1 ids"),
        ("memorization", {"seq_len": 31}, "seq_len 31 is odd"),
        ("memorization", {"seq_len": 0}, "seq_len 0 holds no key"),
        ("compression", {"vocab_size": 1}, "vocab_size 1 has no content"),
        ("compression", {"seq_len": 1}, "seq_len 1 holds no content"),
        ("compression", {"k_motif_size": 3}, "k_motif_size 3 is not read by this task"),
        ("selective-copying", {"vocab_size": 2}, "vocab_size 2 has no content"),
        ("selective-copying", {"num_tokens_to_copy": 0}, "num_tokens_to_copy 0 .*take 1 or more"),
        ("selective-copying", {"seq_len": 33}, "seq_len 33 .* num_tokens_to_copy 16; take 34"),
    ],
)
def test_impossible_sizes(task, sizes, message):
    with pytest.raises(UserError, match=f"MADConfig of {task}: .*{message}"):
        BASELINES[task].replace(**sizes)


@pytest.mark.parametrize(
    "config",
    [
        MADConfig(task="in-context-recall", vocab_size=2, seq_len=4),
        MADConfig(task="in-context-recall", vocab_size=7, seq_len=12),
        BASELINES["fuzzy-in-context-recall"].replace(seq_len=13),
        BASELINES["fuzzy-in-context-recall"].replace(
            vocab_size=3, seq_len=5, k_motif_size=1, v_motif_size=1
        ),
        MADConfig(task="memorization", vocab_size=3, seq_len=2),
        MADConfig(task="compression", vocab_size=2, seq_len=2),
        MADConfig(task="selective-copying", vocab_size=3, seq_len=4, num_tokens_to_copy=1),
    ],
)
def test_smallest_sizes(config):
    splits = instances(config, seed=5, num_train=50, num_test=50)
    check(config, splits.train, seed=5, is_training=True)
    check(config, splits.test, seed=5, is_training=False)


def test_impossible_calls():
    config = BASELINES["compression"]
    with pytest.raises(UserError, match="seed -1 must be in"):
        instances(config, seed=-1, num_train=1, num_test=1)
    with pytest.raises(UserError, match="num_test -2"):
        instances(config, seed=0, num_train=1, num_test=-2)
    with pytest.raises(UserError, match=r"MADConfig\.task must be 'in-context-recall'"):
        MADConfig(task="recall")
