"""Token ids that a model knows: the check for all that reads, trains or generates."""

import numpy as np
from numpy.typing import ArrayLike

from ttcd_jax.errors import DataError


def check_tokens(ids: ArrayLike, vocab_size: int) -> None:
    """Raises `DataError` for `ids` (any shape) that are no integers, or outside 0..vocab_size-1."""
    ids = np.asarray(ids)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        wanted = "they must be integers, as tokenizers give them"
        raise DataError(f"token ids are {ids.dtype}: {wanted}")
    bad = np.argwhere((ids < 0) | (ids >= vocab_size))
    if bad.size:
        position = ", ".join(map(str, bad[0]))
        raise DataError(
            f"token {ids[tuple(bad[0])]} at position {position} is outside the vocabulary of "
            f"{vocab_size} tokens (ids 0..{vocab_size - 1}); encode with this model's tokenizer"
        )
