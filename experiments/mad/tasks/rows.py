"""Rows of the MAD tasks, and the shift of the recall tasks."""

from typing import Any, NamedTuple

import numpy as np

IGNORE = -100


class Rows(NamedTuple):
    """`inputs` and `targets`, int32 [N, T], of the host or a device; a target of -100 is not
    scored."""

    inputs: Any
    targets: Any


def shifted(x: np.ndarray, t: np.ndarray, is_training: bool) -> Rows:
    """Recall rows from sequences [N, T + 1] and the masked targets aligned with them: training asks
    for every next token, the test for the masked ones."""
    return Rows(x[:, :-1], (x if is_training else t)[:, 1:])
