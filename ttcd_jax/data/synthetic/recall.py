"""Key-value recall: pairs are written once, then every key is queried for its value.

With P pairs a row reads `k1 v1 ... kP vP` and then the same pairs in another order, so the value at
a query is known only from the first half. With an attention window below `distance` only a
memory can know it.
"""

import dataclasses

import numpy as np

from ttcd_jax.config import Config
from ttcd_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallConfig(Config):
    """Token ids: keys are 0..num_keys-1, values follow them."""

    num_pairs: int
    num_keys: int
    num_values: int

    def validate(self) -> None:
        if self.num_pairs < 1 or self.num_values < 1:
            raise UserError(
                f"RecallConfig has num_pairs {self.num_pairs} and num_values {self.num_values}; "
                "give 1 or more of each"
            )
        if self.num_keys < self.num_pairs:
            raise UserError(
                f"RecallConfig.num_keys {self.num_keys} is less than num_pairs {self.num_pairs}, "
                "whose keys are distinct; raise num_keys or lower num_pairs"
            )

    @property
    def seq_len(self) -> int:
        """T = 4 * num_pairs - 1: the last value is only a target."""
        return 4 * self.num_pairs - 1

    @property
    def vocab_size(self) -> int:
        return self.num_keys + self.num_values

    @property
    def chance_accuracy(self) -> float:
        """Accuracy of guessing among all values."""
        return 1 / self.num_values


class RecallRows:
    """A random-access source of `num_rows` rows; row i is a pure function of (seed, i).

    Fields [T] as in `ttcd_jax.data.packing`, one segment per row. `loss_mask` is True at query keys
    only. There `distance` [T] int32 counts the positions back to the written value; it is 0
    elsewhere.
    """

    def __init__(self, config: RecallConfig, *, seed: int, num_rows: int) -> None:
        self.config = config
        self._seed = seed
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        num_pairs, num_keys = self.config.num_pairs, self.config.num_keys
        rng = np.random.default_rng([self._seed, index])
        keys = rng.choice(num_keys, num_pairs, replace=False)
        values = num_keys + rng.integers(self.config.num_values, size=num_pairs)
        order = rng.permutation(num_pairs)
        written = np.stack([keys, values], axis=1).astype(np.int32)
        sequence = np.concatenate([written, written[order]]).ravel()
        seq_len = self.config.seq_len
        queries = np.arange(2 * num_pairs, seq_len, 2)
        distance = np.zeros(seq_len, np.int32)
        distance[queries] = queries - (2 * order + 1)
        return {
            "tokens": sequence[:-1],
            "targets": sequence[1:],
            "segment_ids": np.ones(seq_len, np.int32),
            "positions": np.arange(seq_len, dtype=np.int32),
            "loss_mask": distance > 0,
            "distance": distance,
        }
