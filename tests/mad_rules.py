"""The rules of the MAD tasks, token by token: valid rows and their targets."""

import itertools

from experiments.studies.mad.tasks.aligned import key_value_map
from experiments.studies.mad.tasks.rows import IGNORE


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
    value_of = dict(zip(*(part.tolist() for part in key_value_map(config, seed)), strict=True))
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
