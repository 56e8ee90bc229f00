"""The MAD tasks: rules of every row, streams, sizes; parity has the published rows bit by bit."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from experiments.studies.mad import tasks
from experiments.studies.mad.tasks import BASELINES, IGNORE, TASKS, MADConfig, Rows, instances
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
        first, *changed = tasks.settings(task)
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
    for setting in tasks.settings(task):
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


# The rules of the tasks, token by token: valid rows and their targets.


def check(config, rows, *, seed, is_training):
    """Every row obeys its task's rules (`seed`: the map of memorization)."""
    assert rows.inputs.shape == rows.targets.shape == (len(rows.inputs), config.num_positions)
    for inputs, targets in zip(rows.inputs.tolist(), rows.targets.tolist(), strict=True):
        assert all(0 <= token < config.vocab_size for token in inputs)
        if not config.task.endswith("recall"):
            assert targets == RULES[config.task](config, inputs, seed)
            continue
        # The last token of a recall sequence is a target of both splits.
        sequence = [*inputs, targets[-1]]
        masked = RULES[config.task](config, sequence, is_training)
        assert targets == (sequence if is_training else masked)[1:]


def _exact_recall(config, tokens, _is_training):
    num_ids = config.vocab_size - config.noise_vocab_size
    num_keys = num_ids // 2
    value_of, targets, is_known = {}, [], False
    for key, value in itertools.batched(tokens, 2):
        is_pair = key < num_keys <= value < num_ids
        assert is_pair or num_ids <= min(key, value) <= max(key, value) < config.vocab_size
        is_known = key in value_of
        targets += [IGNORE, value if is_known else IGNORE]
        assert not is_pair or value_of.setdefault(key, value) == value
    assert is_known, "the last slot asks for an earlier key"
    return targets


def _fuzzy_recall(config, tokens, is_training):
    pad = config.vocab_size - 1
    groups = itertools.groupby(tokens, lambda token: (token >= pad // 2) + (token == pad))
    kinds, runs = zip(*((kind, tuple(run)) for kind, run in groups), strict=True)
    assert kinds == (2, *itertools.islice(itertools.cycle((0, 1)), len(kinds) - 1))
    assert len(kinds) % 2 == 1, "pads, then a value after every key"
    assert 2 <= len(runs[0]) <= config.k_motif_size + config.v_motif_size + 1
    value_of, targets = {}, [IGNORE] * len(runs[0])
    pairs = list(itertools.batched(runs[1:], 2))
    for number, (key, value) in enumerate(pairs, 1):
        shortest = 1 if is_training else config.k_motif_size
        assert shortest <= len(key) <= config.k_motif_size
        assert len(value) <= config.v_motif_size
        assert all(len(set(motif)) == len(motif) for motif in (key, value))
        is_target = key in value_of or number == len(pairs)
        targets += [IGNORE] * len(key) + (list(value) if is_target else [IGNORE] * len(value))
        assert value_of.setdefault(key, value) == value
    return targets


def _memorization(config, tokens, seed):
    value_of = dict(
        zip(*(part.tolist() for part in tasks.key_value_map(config, seed)), strict=True)
    )
    assert set(tokens[1::2]) == {config.vocab_size - 1}
    return [x for key in tokens[::2] for x in (IGNORE, value_of[key])]


def _compression(config, tokens, _seed):
    assert max(tokens[:-1]) < tokens[-1] == config.vocab_size - 1
    return tokens


def _copying(config, tokens, _seed):
    num_copied, blank = config.num_tokens_to_copy, config.vocab_size - 2
    mixed, rest = tokens[: -num_copied - 1], tokens[-num_copied - 1 :]
    content = [token for token in mixed if token < blank]
    assert mixed[-1] < blank >= max(mixed)
    assert len(content) == num_copied
    assert rest == [blank + 1, *[blank] * num_copied]
    return [IGNORE] * len(mixed) + [IGNORE] + content


RULES = {
    "in-context-recall": _exact_recall,
    "noisy-in-context-recall": _exact_recall,
    "fuzzy-in-context-recall": _fuzzy_recall,
    "memorization": _memorization,
    "compression": _compression,
    "selective-copying": _copying,
}
