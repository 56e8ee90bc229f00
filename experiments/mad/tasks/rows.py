"""What the MAD tasks share: rows, the shift of the recall tasks, and refusing a wrong row."""

from typing import NamedTuple

import numpy as np

from ttcd_jax.errors import DataError

IGNORE = -100


class Rows(NamedTuple):
    """`inputs` and `targets`, int32 [N, T]; a target of -100 is not scored."""

    inputs: np.ndarray
    targets: np.ndarray


def shifted(x: np.ndarray, t: np.ndarray, is_training: bool) -> Rows:
    """Recall rows from sequences [N, T + 1] and the masked targets aligned with them: training asks
    for every next token, the test for the masked ones."""
    return Rows(x[:, :-1], (x if is_training else t)[:, 1:])


def unshifted(rows: Rows) -> np.ndarray:
    """The sequences [N, T + 1] behind recall rows, whose last token is always a target."""
    return np.concatenate([rows.inputs, rows.targets[:, -1:]], axis=1)


def require(holds: np.ndarray, rule: str) -> None:
    """Raises `DataError` naming the first row where `holds` ([N] or [N, ...]) is not all True."""
    wrong = np.flatnonzero(~holds.all(axis=tuple(range(1, holds.ndim))))
    if wrong.size:
        raise DataError(
            f"row {wrong[0]} breaks the rule that {rule} ({wrong.size} of {len(holds)} rows do); "
            "draw the rows anew from this configuration and seed"
        )
