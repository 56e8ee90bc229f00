"""The recall tasks: exact, fuzzy.

In-context recall, plain and noisy: a repeated key is followed by its value.

Ids: keys, values, noise, in this order; keys are half of what noise leaves, values the rest. A row
is L / 2 slots of two tokens. One slot, drawn first, is never noise; each other becomes two noise
tokens with probability `frac_noise`. The last slot asks for a key of an earlier one. Masked targets
are the values of keys that an earlier slot has.

Fuzzy in-context recall: keys and values are motifs, tuples of one or more distinct tokens.

Ids: key tokens, value tokens, and the last id pads. Training draws a key's length from
1 .. k_motif_size, the test takes the longest; a value's length is always drawn from
1 .. v_motif_size. One pair, the probe, is drawn first, inserted at the first pair from a drawn
position on unless its key was drawn before, and asked for at the end (rarely the pairs end before
that position: then the probe was never presented). Rows are padded on the left. Masked targets are
the values of keys presented before, and the probe's at the end.
"""

import functools
import itertools

import numpy as np

from experiments.studies.mad.tasks.rows import IGNORE, Draws, Rows, shifted
from experiments.studies.mad.tasks.settings import MADConfig


def draw(config: MADConfig, draws: Draws, num_rows: int, is_training: bool) -> Rows:
    """Rows of T = L - 1."""
    x, t = (np.empty((num_rows, config.seq_len), np.int32) for _ in range(2))
    for row in range(num_rows):
        tokens, targets, value_of = _slots(config, draws)
        while not value_of:  # noise alone: no key to ask for, and the published code fails
            tokens, targets, value_of = _slots(config, draws)
        probe = list(value_of)[draws.below(len(value_of))]
        x[row] = [*tokens, probe, value_of[probe]]
        t[row] = [*targets, IGNORE, value_of[probe]]
    return shifted(x, t, is_training)


def _slots(config: MADConfig, draws: Draws) -> tuple[list[int], list[int], dict[int, int]]:
    """All slots but the last: tokens, masked targets, and the value of each key in the order of
    first appearance."""
    num_ids = config.vocab_size - config.noise_vocab_size
    num_keys, num_slots = num_ids // 2, config.seq_len // 2
    frac_noise, below, random = config.frac_noise, draws.below, draws.generator.random
    clean_slot = below(num_slots)
    x, t, value_of = [], [], {}
    for slot in range(num_slots - 1):
        if frac_noise > 0 and slot != clean_slot and random() < frac_noise:
            x += [num_ids + below(config.noise_vocab_size) for _ in range(2)]
            t += [IGNORE, IGNORE]
            continue
        key = below(num_keys)
        is_known = key in value_of
        if not is_known:
            value_of[key] = num_keys + below(num_ids - num_keys)
        x += [key, value_of[key]]
        t += [IGNORE, value_of[key] if is_known else IGNORE]
    return x, t, value_of


Motif = tuple[int, ...]


@functools.cache
def _all_motifs(tokens: range, length: int) -> list[Motif]:
    return list(itertools.permutations(tokens, length))


class _Motifs:
    """Motifs of several lengths, shuffled as the published code shuffles them for each row."""

    def __init__(self, draws: Draws, tokens: range, lengths: range) -> None:
        self._draws, self._lengths = draws, lengths
        self._motifs = {length: _all_motifs(tokens, length) for length in lengths}
        self._order = {
            length: draws.generator.permutation(len(motifs))
            for length, motifs in self._motifs.items()
        }

    def draw_length(self) -> int:
        return self._lengths[self._draws.below(len(self._lengths))]

    def draw(self, length: int) -> Motif:
        motifs = self._motifs[length]
        return motifs[self._order[length][self._draws.below(len(motifs))]]


def draw_fuzzy(config: MADConfig, draws: Draws, num_rows: int, is_training: bool) -> Rows:
    """Rows of T = L."""
    pad = config.vocab_size - 1
    x = np.full((num_rows, config.seq_len + 1), pad, np.int32)
    t = np.full_like(x, IGNORE)
    shortest = 1 if is_training else config.k_motif_size
    for row in range(num_rows):
        keys = _Motifs(draws, range(pad // 2), range(shortest, config.k_motif_size + 1))
        values = _Motifs(draws, range(pad // 2, pad), range(1, config.v_motif_size + 1))
        tokens, targets = [], []
        for key, value, is_target in _pairs(config, draws, keys, values):
            tokens += key + value
            targets += [IGNORE] * len(key)
            targets += value if is_target else [IGNORE] * len(value)
        x[row, -len(tokens) :], t[row, -len(tokens) :] = tokens, targets
    return shifted(x, t, is_training)


def _pairs(
    config: MADConfig, draws: Draws, keys: _Motifs, values: _Motifs
) -> list[tuple[Motif, Motif, bool]]:
    """(key, value, whether the value is a masked target) of one row. Lengths are drawn for every
    pair; those of a known key or of the probe are not used."""
    lengths = keys.draw_length(), values.draw_length()
    probe = keys.draw(lengths[0])
    value_of = {probe: values.draw(lengths[1])}
    probe_position = draws.below(config.seq_len - 2 * sum(lengths))
    room = config.seq_len - sum(lengths) - config.k_motif_size - config.v_motif_size
    pairs, presented, num_tokens = [], set(), 0
    while num_tokens < room:
        key_length, value_length = keys.draw_length(), values.draw_length()
        if num_tokens >= probe_position and probe not in presented:
            key = probe
        else:
            key = keys.draw(key_length)
        if key not in value_of:
            value_of[key] = values.draw(value_length)
        pairs.append((key, value_of[key], key in presented))
        presented.add(key)
        num_tokens += len(key + value_of[key])
    return [*pairs, (probe, value_of[probe], True)]
