"""The MAD tasks: rules of every row, streams, sizes; parity has the published rows bit by bit."""

from pathlib import Path

import numpy as np
import pytest
from mad_rules import check

from experiments.studies.mad.tasks.instances import instances
from experiments.studies.mad.tasks.rows import Rows
from experiments.studies.mad.tasks.settings import BASELINES, TASKS, MADConfig, settings
from tests.parity.golden import Golden
from tests.parity.mad import task_config

GOLDEN = Path(__file__).parents[3] / "golden"
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


def test_there_are_66_settings_as_published_each_the_baseline_or_one_change_of_it():
    numbers = dict(zip(TASKS, (11, 14, 11, 6, 11, 13), strict=True))
    for task in TASKS:
        first, *changed = settings(task)
        assert first == ("default", BASELINES[task], 256 if task == "memorization" else 12_800)
        assert len({setting[1:] for setting in (first, *changed)}) == numbers[task]
        for setting in changed:
            name, value = setting.name.split("=")
            sizes, usual = (
                x.config.to_dict() | {"num_train": x.num_train} for x in (setting, first)
            )
            assert sizes == usual | {name: float(value)}


def checked(config, *, seed, num_train, num_test):
    """Instances that obey the rules."""
    splits = instances(config, seed=seed, num_train=num_train, num_test=num_test)
    check(config, splits.train, seed=seed, is_training=True)
    check(config, splits.test, seed=seed, is_training=False)
    return splits


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_a_pure_function_of_seed_and_numbers(task):
    config = BASELINES[task]
    first = instances(config, seed=3, num_train=9, num_test=5)
    again = instances(config, seed=3, num_train=9, num_test=5)
    np.testing.assert_equal(first, again)
    prefix = checked(config, seed=3, num_train=4, num_test=0)
    np.testing.assert_array_equal(prefix.train.inputs, first.train.inputs[:4])
    assert prefix.test.inputs.shape == prefix.test.targets.shape == (0, config.num_positions)
    other = checked(config, seed=4, num_train=9, num_test=5)
    for ours, others in zip(first, other, strict=True):
        assert not (ours.inputs == others.inputs).all(1).any()


@pytest.mark.parametrize("task", TASKS)
def test_rows_of_every_setting_obey_the_rules(task):
    for setting in settings(task):
        checked(setting.config, seed=6, num_train=2, num_test=2)


def test_row_of_noise_alone_is_drawn_anew():
    # Without the guard about one row in eight would have no key to ask for.
    config = MADConfig(
        task="noisy-in-context-recall", vocab_size=8, seq_len=10, frac_noise=0.9, noise_vocab_size=2
    )
    checked(config, seed=0, num_train=300, num_test=100)


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
    checked(config, seed=5, num_train=50, num_test=50)
