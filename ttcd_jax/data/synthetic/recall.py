"""Key-value recall: rows of key-value pairs, in which a repeated key has the same value.

A row is `k v k v ...`: every slot draws a key, and within a row a key keeps its value. The target
at a repeated key is its value; the distance is counted back to the key's last value. Beyond the
reach of the attention windows only a memory can recall it.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import numpy as np

from ttcd_jax.config import AtLeast, Config, Positive
from ttcd_jax.data.pipeline import ENDLESS
from ttcd_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallConfig(Config):
    """`num_slots` pairs per row. Token ids: `num_keys` keys from 0 on, then `num_values` values."""

    num_slots: Annotated[int, AtLeast(2)]
    num_keys: Positive
    num_values: Positive

    @property
    def seq_len(self) -> int:
        """T = 2 * num_slots - 1: the last value is only a target."""
        return 2 * self.num_slots - 1

    @property
    def vocab_size(self) -> int:
        return self.num_keys + self.num_values

    @property
    def chance_accuracy(self) -> float:
        """Accuracy of guessing among all values."""
        return 1 / self.num_values

    def rows(self, seed: int, batch_size: int = 1) -> tuple["RecallRows", dict[str, Any]]:
        """(endless rows, manifest)."""
        return RecallRows(self, seed=seed, num_rows=ENDLESS), {"kind": "recall", "seed": seed}


class RecallRows:
    """A random-access source of `num_rows` rows; row i is a pure function of (seed, i).

    Fields [T] as in `ttcd_jax.data.packing`, without segment ids. `loss_mask` is True at repeated
    keys, where `distance` [T] int32 counts the positions back to the key's last value; it is 0
    elsewhere.
    """

    def __init__(self, config: RecallConfig, *, seed: int, num_rows: int) -> None:
        self.config, self._seed, self._num_rows = config, seed, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        config = self.config
        rng = np.random.default_rng([self._seed, index])
        value_of = config.num_keys + rng.integers(config.num_values, size=config.num_keys)
        keys = rng.integers(config.num_keys, size=config.num_slots)
        sequence = np.stack([keys, value_of[keys]], axis=1).astype(np.int32).ravel()
        # Slots sorted by key, then position: neighbours of one key are its successive occurrences.
        order = np.argsort(keys, kind="stable")
        is_repeat = np.diff(keys[order]) == 0
        now, before = order[1:][is_repeat], order[:-1][is_repeat]
        distance = np.zeros(config.seq_len, np.int32)
        distance[2 * now] = 2 * now - (2 * before + 1)
        return {
            "tokens": sequence[:-1],
            "targets": sequence[1:],
            "positions": np.arange(config.seq_len, dtype=np.int32),
            "loss_mask": distance > 0,
            "distance": distance,
        }


class Needles(NamedTuple):
    """Pairs to remember across a haystack of other pairs, in B independent rows."""

    pairs: np.ndarray  # [B, 2 P] int32: key, value of the needles
    haystack: np.ndarray  # [B, T] int32: pairs of the other keys, repeated
    keys: np.ndarray  # [B, P]: the queries after the haystack
    values: np.ndarray  # [B, P]: the answers


def needles(
    config: RecallConfig, *, seed: int, num_rows: int, num_needles: int, num_tokens: int
) -> Needles:
    """Needles in `num_rows` rows with a haystack of `num_tokens` tokens, an even number."""
    if config.num_keys <= num_needles:
        raise UserError(
            f"RecallConfig.num_keys {config.num_keys} must be more than the {num_needles} needles: "
            "the others are the haystack"
        )
    rng = np.random.default_rng(seed)
    shape = (num_rows, config.num_keys)
    value_of = config.num_keys + rng.integers(config.num_values, size=shape)
    planted, others = np.split(rng.permuted(np.indices(shape)[1], axis=1), [num_needles], axis=1)
    choices = rng.integers(others.shape[1], size=(num_rows, num_tokens // 2))

    def pairs(keys: np.ndarray) -> np.ndarray:
        values = np.take_along_axis(value_of, keys, axis=1)
        return np.stack([keys, values], axis=2).astype(np.int32).reshape(num_rows, -1)

    return Needles(
        pairs=pairs(planted),
        haystack=pairs(np.take_along_axis(others, choices, axis=1)),
        keys=planted.astype(np.int32),
        values=np.take_along_axis(value_of, planted, axis=1),
    )
