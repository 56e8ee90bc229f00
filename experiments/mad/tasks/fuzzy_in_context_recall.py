"""Fuzzy in-context recall: keys and values are motifs, tuples of one or more distinct tokens.

Ids: key tokens, value tokens, and the last id pads. Training draws a key's length from
1 .. k_motif_size, the test takes the longest; a value's length is always drawn from
1 .. v_motif_size. One pair, the probe, is drawn first, inserted at the first pair from a drawn
position on unless its key was drawn before, and asked for at the end (seldom the pairs end before
that position: then the probe was never presented). Rows are padded on the left. Masked targets are
the values of keys presented before, and the probe's at the end.

A motif is the tuple (length, index among all motifs of that length in lexicographic order).
"""

import functools
import math

import numpy as np

from experiments.mad.tasks.config import MADConfig
from experiments.mad.tasks.draws import Draws
from experiments.mad.tasks.rows import IGNORE, Rows, shifted

Motif = tuple[int, int]
Tokens = tuple[int, ...]


@functools.lru_cache(maxsize=2**16)
def motif_tokens(motif: Motif, num_tokens: int) -> Tokens:
    """The motif's distinct tokens of 0 .. num_tokens - 1: item `index` of
    `itertools.permutations(range(num_tokens), length)`."""
    length, index = motif
    left = list(range(num_tokens))
    tokens = []
    for remaining in reversed(range(length)):
        position, index = divmod(index, math.perm(len(left) - 1, remaining))
        tokens.append(left.pop(position))
    return tuple(tokens)


class _Motifs:
    """Motifs of several lengths, shuffled as the published code shuffles them for each row."""

    def __init__(self, draws: Draws, num_tokens: int, lengths: range) -> None:
        self._draws, self._lengths = draws, lengths
        self._shuffled = [
            draws.generator.permutation(math.perm(num_tokens, length)) for length in lengths
        ]

    def draw_length(self) -> int:
        return self._lengths[self._draws.below(len(self._lengths))]

    def draw(self, length: int) -> Motif:
        shuffled = self._shuffled[length - self._lengths[0]]
        return length, int(shuffled[self._draws.below(len(shuffled))])


def draw(config: MADConfig, draws: Draws, num_rows: int, is_training: bool) -> Rows:
    """Rows of T = L."""
    num_keys = (config.vocab_size - 1) // 2
    num_values = config.vocab_size - 1 - num_keys
    x = np.full((num_rows, config.seq_len + 1), config.vocab_size - 1, np.int32)
    t = np.full_like(x, IGNORE)
    shortest = 1 if is_training else config.k_motif_size
    for row in range(num_rows):
        keys = _Motifs(draws, num_keys, range(shortest, config.k_motif_size + 1))
        values = _Motifs(draws, num_values, range(1, config.v_motif_size + 1))
        tokens, targets = [], []
        for key, value, is_target in _pairs(config, draws, keys, values):
            value_tokens = [num_keys + token for token in motif_tokens(value, num_values)]
            tokens += [*motif_tokens(key, num_keys), *value_tokens]
            targets += [IGNORE] * key[0]
            targets += value_tokens if is_target else [IGNORE] * value[0]
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
        num_tokens += key[0] + value_of[key][0]
    return [*pairs, (probe, value_of[probe], True)]
