"""Compression: drawn tokens, then the compression id; every token is its own target.

The model makes it a task: its decoder sees the last position's output alone. Ids: content is
0 .. V - 2, the compression id V - 1, which is a target as well.
"""

import numpy as np

from experiments.mad.tasks.config import MADConfig
from experiments.mad.tasks.draws import Draws
from experiments.mad.tasks.rows import Rows


def draw(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
    """Rows of T = L, of one kind in both splits."""
    last = config.vocab_size - 1
    x = np.full((num_rows, config.seq_len), last, np.int32)
    x[:, :-1] = draws.generator.integers(0, last, size=(num_rows, config.seq_len - 1))
    return Rows(x, x.copy())
