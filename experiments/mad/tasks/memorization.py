"""Memorization: the insert id follows a key, and there the value of a fixed map is asked for.

The map never stands in the context, so only weights can hold it. Ids: keys are half of 0 .. V - 2,
values the rest, V - 1 is the insert id.
"""

import numpy as np

from experiments.mad.tasks.config import MADConfig
from experiments.mad.tasks.draws import Draws
from experiments.mad.tasks.rows import IGNORE, Rows, require


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
    # Every row first draws a slot that noise, which this task has not, would leave out.
    limits = np.full((num_rows, 1 + num_slots), len(keys))
    limits[:, 0] = num_slots
    chosen = draws.generator.integers(0, limits)[:, 1:]
    x = np.full((num_rows, config.seq_len), config.vocab_size - 1, np.int32)
    t = np.full_like(x, IGNORE)
    x[:, 0::2], t[:, 1::2] = keys[chosen], values[chosen]
    return Rows(x, t)


def check(config: MADConfig, rows: Rows, seed: int, _is_training: bool) -> None:
    """Keys alternate with the insert id, and targets are the map's values of this seed."""
    keys, values = key_value_map(config, seed)
    key = rows.inputs[:, 0::2]
    require((key >= 0) & (key < len(keys)), f"keys lie in 0 .. {len(keys) - 1}")
    require(rows.inputs[:, 1::2] == config.vocab_size - 1, "every other token is the insert id")
    t = np.full_like(rows.targets, IGNORE)
    t[:, 1::2] = values[np.argsort(keys)][key]
    require(rows.targets == t, f"targets are the values of the map of seed {seed}")
