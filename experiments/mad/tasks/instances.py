"""The splits of a MAD task: one table from its name to the function that draws its rows."""

from collections.abc import Callable
from typing import NamedTuple

from experiments.mad.tasks import (
    compression,
    fuzzy_in_context_recall,
    in_context_recall,
    memorization,
    selective_copying,
)
from experiments.mad.tasks.config import MADConfig, TaskName
from experiments.mad.tasks.draws import Draws
from experiments.mad.tasks.rows import Rows
from ttcd_jax.errors import UserError


class Splits(NamedTuple):
    """Both parts of a data set."""

    train: Rows
    test: Rows


# `draw(config, draws, num_rows, is_training)` takes the next rows from the stream.
_DRAW: dict[TaskName, Callable[[MADConfig, Draws, int, bool], Rows]] = {
    "in-context-recall": in_context_recall.draw,
    "noisy-in-context-recall": in_context_recall.draw,
    "fuzzy-in-context-recall": fuzzy_in_context_recall.draw,
    "memorization": memorization.draw,
    "compression": compression.draw,
    "selective-copying": selective_copying.draw,
}


def instances(config: MADConfig, *, seed: int, num_train: int, num_test: int) -> Splits:
    """The published instances of a seed: training rows first, then the test rows of their stream.

    Raises `UserError` for a seed outside 0 .. 2^32 - 1 or a negative number of rows.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"seed {seed} must be in 0 .. {2**32 - 1}")
    if min(num_train, num_test) < 0:
        raise UserError(f"num_train {num_train} and num_test {num_test} must be 0 or more")
    draw, draws = _DRAW[config.task], Draws(seed)
    return Splits(
        train=draw(config, draws, num_train, True), test=draw(config, draws, num_test, False)
    )
