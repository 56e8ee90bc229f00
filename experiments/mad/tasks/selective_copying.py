"""Selective copying: repeat the content in order, without the blanks strewn between it.

Ids: content is 0 .. V - 3, the blank V - 2, the copy id V - 1. A row reads content with blanks, the
copy id, then as many blanks as there is content; there the content is the target.
"""

import numpy as np

from experiments.mad.tasks.config import MADConfig
from experiments.mad.tasks.draws import Draws
from experiments.mad.tasks.rows import IGNORE, Rows, require


def draw(config: MADConfig, draws: Draws, num_rows: int, _is_training: bool) -> Rows:
    """Rows of T = L, of one kind in both splits."""
    num_copied = config.num_tokens_to_copy
    num_blanks = config.seq_len - 2 * num_copied - 1
    blank = config.vocab_size - 2
    content = draws.generator.integers(0, blank, size=(num_rows, num_copied))
    # A blank goes before the content element it drew, so never right before the copy id.
    place = draws.legacy.randint(0, num_copied, size=(num_rows, num_blanks))
    element = np.broadcast_to(np.arange(num_copied), content.shape)
    order = np.argsort(np.concatenate([place, element], 1), axis=1, kind="stable")
    mixed = np.concatenate([np.full_like(place, blank), content], 1)
    x = np.full((num_rows, config.seq_len), blank, np.int32)
    x[:, : num_blanks + num_copied] = np.take_along_axis(mixed, order, 1)
    x[:, num_blanks + num_copied] = config.vocab_size - 1
    t = np.full_like(x, IGNORE)
    t[:, -num_copied:] = content
    return Rows(x, t)


def check(config: MADConfig, rows: Rows, _seed: int, _is_training: bool) -> None:
    """Content with blanks, the copy id, blanks; targets repeat the content at the end."""
    num_copied = config.num_tokens_to_copy
    blank = config.vocab_size - 2
    mixed, rest = np.split(rows.inputs, [config.seq_len - num_copied - 1], axis=1)
    require((mixed >= 0) & (mixed <= blank), f"content and blanks lie in 0 .. {blank}")
    is_content = mixed < blank
    require(is_content.sum(1) == num_copied, f"it holds {num_copied} content tokens")
    require(is_content[:, -1], "content stands right before the copy id")
    require(rest == [blank + 1, *[blank] * num_copied], "the copy id and blanks end it")
    t = np.full_like(rows.targets, IGNORE)
    t[:, -num_copied:] = mixed[is_content].reshape(-1, num_copied)
    require(rows.targets == t, "targets repeat the content in order at the end")
