"""In-context recall, plain and noisy: a repeated key is followed by its value.

Ids: keys, values, noise, in this order; keys are half of what noise leaves, values the rest. A row
is L / 2 slots of two tokens. One slot, drawn first, is never noise; each other becomes two noise
tokens with probability `frac_noise`. The last slot asks for a key of an earlier one. Masked targets
are the values of keys that an earlier slot has.
"""

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
