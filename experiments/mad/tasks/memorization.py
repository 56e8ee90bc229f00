"""Memorization: the insert id follows a key, and its target is the value in a fixed map.

The map is never in the context, so only weights can hold it. Ids: keys are half of 0 .. V - 2,
values the rest, V - 1 is the insert id.
"""

import numpy as np

from experiments.mad.tasks.config import MADConfig
from experiments.mad.tasks.draws import Draws
from experiments.mad.tasks.rows import IGNORE, Rows


def key_value_map(config: MADConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(keys, their values), [(V - 1) // 2] each, in the shuffled order that rows index. A surplus
    value is left out."""
    num_keys = (config.vocab_size - 1) // 2
    generator = np.random.default_rng(seed)
    keys = generator.permutation(num_keys)
    values = num_keys + generator.permutation(config.vocab_size - 1 - num_keys)
    return keys, values[:num_keys]


def draw(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
    """Rows of T = L, of one kind in both splits."""
    keys, values = key_value_map(config, draws.seed)
    num_slots = config.seq_len // 2
    # Every row first draws a slot that noise would leave out; this task has none.
    limits = np.full((num_rows, 1 + num_slots), len(keys))
    limits[:, 0] = num_slots
    chosen = draws.generator.integers(0, limits)[:, 1:]
    x = np.full((num_rows, config.seq_len), config.vocab_size - 1, np.int32)
    t = np.full_like(x, IGNORE)
    x[:, 0::2], t[:, 1::2] = keys[chosen], values[chosen]
    return Rows(x, t)
