"""The tasks whose targets are aligned with the inputs, of one kind in both splits; rows of T = L.

Memorization: the insert id V - 1 follows a key, and its target is the value in a fixed map. The map
is never in the context, so only weights can hold it. Keys are half of 0 .. V - 2, values the rest.

Compression: drawn tokens 0 .. V - 2, then the compression id V - 1; every token is its own target.
The model makes it a task: its decoder sees the last position's output alone.

Selective copying: repeat the content, 0 .. V - 3, in order, without the blanks V - 2 between it. A
row reads content with blanks, the copy id V - 1, then as many blanks as there is content; there the
content is the target.
"""

import numpy as np

from experiments.studies.mad.tasks.rows import IGNORE, Draws, Rows
from experiments.studies.mad.tasks.settings import MADConfig


def key_value_map(config: MADConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(keys, their values) of memorization, [(V - 1) // 2] each, in the shuffled order that rows
    index. A surplus value is left out."""
    num_keys = (config.vocab_size - 1) // 2
    generator = np.random.default_rng(seed)
    keys = generator.permutation(num_keys)
    values = num_keys + generator.permutation(config.vocab_size - 1 - num_keys)
    return keys, values[:num_keys]


def draw_memorization(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
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


def draw_compression(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
    last = config.vocab_size - 1
    x = np.full((num_rows, config.seq_len), last, np.int32)
    x[:, :-1] = draws.generator.integers(0, last, size=(num_rows, config.seq_len - 1))
    return Rows(x, x.copy())


def draw_copying(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
    num_copied = config.num_tokens_to_copy
    num_blanks = config.seq_len - 2 * num_copied - 1
    blank = config.vocab_size - 2
    content = draws.generator.integers(0, blank, size=(num_rows, num_copied))
    # A blank goes before the content element it drew, so never right before the copy id.
    before = draws.legacy.randint(0, num_copied, size=(num_rows, num_blanks))
    element = np.broadcast_to(np.arange(num_copied), content.shape)
    order = np.argsort(np.concatenate([before, element], 1), axis=1, kind="stable")
    mixed = np.concatenate([np.full_like(before, blank), content], 1)
    x = np.full((num_rows, config.seq_len), blank, np.int32)
    x[:, : num_blanks + num_copied] = np.take_along_axis(mixed, order, 1)
    x[:, num_blanks + num_copied] = config.vocab_size - 1
    t = np.full_like(x, IGNORE)
    t[:, -num_copied:] = content
    return Rows(x, t)
