"""The splits of a MAD task and their check: one table from a task's name to its functions."""

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
from ttcd_jax.errors import DataError, UserError


class Splits(NamedTuple):
    """Both parts of a data set."""

    train: Rows
    test: Rows


class Task(NamedTuple):
    """`draw(config, draws, num_rows, is_training)` takes rows from the stream;
    `check(config, rows, seed, is_training)` raises `DataError` at a row that breaks a rule."""

    draw: Callable[[MADConfig, Draws, int, bool], Rows]
    check: Callable[[MADConfig, Rows, int, bool], None]


_RECALL = Task(in_context_recall.draw, in_context_recall.check)
TASKS: dict[TaskName, Task] = {
    "in-context-recall": _RECALL,
    "noisy-in-context-recall": _RECALL,
    "fuzzy-in-context-recall": Task(fuzzy_in_context_recall.draw, fuzzy_in_context_recall.check),
    "memorization": Task(memorization.draw, memorization.check),
    "compression": Task(compression.draw, compression.check),
    "selective-copying": Task(selective_copying.draw, selective_copying.check),
}


def instances(config: MADConfig, *, seed: int, num_train: int, num_test: int) -> Splits:
    """The published instances of a seed: training rows first, test rows go on with their stream.

    Raises `UserError` for a seed outside 0 .. 2^32 - 1 or a negative number of rows.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"seed {seed} must lie in 0 .. {2**32 - 1}")
    if min(num_train, num_test) < 0:
        raise UserError(f"num_train {num_train} and num_test {num_test} must be 0 or more")
    task, draws = TASKS[config.task], Draws(seed)
    return Splits(
        train=task.draw(config, draws, num_train, True),
        test=task.draw(config, draws, num_test, False),
    )


def check(config: MADConfig, rows: Rows, *, seed: int, is_training: bool) -> None:
    """Every row obeys its task's rules (`seed`: memorization's map). Raises `DataError` naming the
    first row that does not, and the rule."""
    length = config.num_positions
    if not rows.inputs.shape == rows.targets.shape == (len(rows.inputs), length):
        raise DataError(
            f"inputs {rows.inputs.shape} and targets {rows.targets.shape} must both be "
            f"[rows, {length}] for {config.task} of seq_len {config.seq_len}"
        )
    TASKS[config.task].check(config, rows, seed, is_training)
