"""The splits of a MAD task: one table from its name to the function that draws its rows."""

from collections.abc import Callable
from typing import NamedTuple

from experiments.studies.mad.tasks import aligned, recall
from experiments.studies.mad.tasks.rows import Draws, Rows
from experiments.studies.mad.tasks.settings import MADConfig, TaskName


class Splits(NamedTuple):
    """Both parts of a data set."""

    train: Rows
    test: Rows


# `draw(config, draws, num_rows, is_training)` takes the next rows from the stream.
_DRAW: dict[TaskName, Callable[[MADConfig, Draws, int, bool], Rows]] = {
    "in-context-recall": recall.draw,
    "noisy-in-context-recall": recall.draw,
    "fuzzy-in-context-recall": recall.draw_fuzzy,
    "memorization": aligned.draw_memorization,
    "compression": aligned.draw_compression,
    "selective-copying": aligned.draw_copying,
}


def instances(config: MADConfig, *, seed: int, num_train: int, num_test: int) -> Splits:
    """The published instances of a seed, 0 .. 2^32 - 1: training rows first, then the test rows of
    their stream."""
    draw, draws = _DRAW[config.task], Draws(seed)
    train = draw(config, draws, num_train, True)
    return Splits(train, test=draw(config, draws, num_test, False))
