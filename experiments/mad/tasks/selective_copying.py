"""Selective copying: repeat the content in order, without the blanks between it.

Ids: content is 0 .. V - 3, the blank V - 2, the copy id V - 1. A row reads content with blanks, the
copy id, then as many blanks as there is content; there the content is the target.
"""

import numpy as np

from experiments.mad.tasks.config import MADConfig
from experiments.mad.tasks.draws import Draws
from experiments.mad.tasks.rows import IGNORE, Rows


def draw(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
    """Rows of T = L, of one kind in both splits."""
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
