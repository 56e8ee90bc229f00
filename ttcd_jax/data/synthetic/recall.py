"""Key-value recall: rows of key-value pairs, in which a repeated key has the same value.

A row is `k v k v ...`: every slot draws a key, and within a row a key keeps its value. The target
at a repeated key is its value; the distance is counted back to the key's last value. Beyond the
reach of the attention windows only a memory can recall it.
"""

import dataclasses
from typing import Annotated, ClassVar

import numpy as np

from ttcd_jax.config import AtLeast
from ttcd_jax.data.synthetic.rows import Fields, Rng, SyntheticConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallConfig(SyntheticConfig):
    """`num_slots` pairs per row."""

    kind: ClassVar[str] = "recall"
    fact_size: ClassVar[int] = 2
    num_slots: Annotated[int, AtLeast(2)]

    @property
    def seq_len(self) -> int:
        """T = 2 * num_slots - 1: the last value is only a target."""
        return 2 * self.num_slots - 1

    def row(self, rng: Rng) -> Fields:
        value_of = self.num_keys + rng.integers(self.num_values, size=self.num_keys)
        keys = rng.integers(self.num_keys, size=self.num_slots)
        sequence = self.facts(rng, keys[None], value_of[keys][None])[0]
        # Slots sorted by key, then position: neighbours of one key are its successive occurrences.
        order = np.argsort(keys, kind="stable")
        is_repeat = np.diff(keys[order]) == 0
        now, before = order[1:][is_repeat], order[:-1][is_repeat]
        distance = np.zeros(self.seq_len, np.int32)
        distance[2 * now] = 2 * now - (2 * before + 1)
        return sequence[:-1], sequence[1:], distance

    def facts(self, rng: Rng, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.stack([keys, values], axis=2).astype(np.int32).reshape(len(keys), -1)
