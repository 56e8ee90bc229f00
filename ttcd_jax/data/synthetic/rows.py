"""Rows of facts and questions that are drawn, not read: what all such data share."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ttcd_jax.config import Config, Positive
from ttcd_jax.data.pipeline import ENDLESS
from ttcd_jax.errors import UserError

HELD_OUT = 1_000_003  # the seed of evaluations: differs from any training seed of a few digits
Rng = np.random.Generator
Fields = tuple[np.ndarray, np.ndarray, np.ndarray]


class Needles(NamedTuple):
    """Facts to remember across a haystack of facts of other keys, in B independent rows."""

    facts: np.ndarray  # [B, T] int32: of the needles
    haystack: np.ndarray  # [B, T] int32: of the other keys, repeated
    questions: np.ndarray  # [B, P, Q] int32: each ends with a needle's key
    values: np.ndarray  # [B, P]: the answers


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticConfig(Config, abc.ABC):
    """Rows of `seq_len` tokens with facts of `fact_size`, a key and its value. Token ids:
    `num_keys` keys from 0 on, then `num_values` values, then what else a row has."""

    kind: ClassVar[str] = "synthetic"  # in manifests and sentences; the name of its task
    num_keys: Positive
    num_values: Positive
    fact_size: ClassVar[Any]
    seq_len: ClassVar[Any]

    @property
    def vocab_size(self) -> int:
        return self.num_keys + self.num_values

    @abc.abstractmethod
    def row(self, rng: Rng) -> Fields:
        """(tokens, targets, distance) [T] int32; `distance` counts the positions from a question
        back to its value, 0 where nothing is asked."""

    @abc.abstractmethod
    def facts(self, rng: Rng, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The tokens [B, N fact_size] int32 of facts [B, N]."""

    def questions(self, rng: Rng, keys: np.ndarray) -> np.ndarray:
        """The tokens [B, N, Q] int32 that ask for keys [B, N]: these alone, or at their end."""
        return keys[..., None].astype(np.int32)

    def rows(self, seed: int, batch_size: int = 1) -> tuple["SyntheticRows", dict[str, Any]]:
        """(endless rows, manifest)."""
        return SyntheticRows(self, seed=seed, num_rows=ENDLESS), {"kind": self.kind, "seed": seed}

    def needles(self, *, seed: int, num_rows: int, num_needles: int, num_tokens: int) -> Needles:
        """Needles in `num_rows` rows, and whole facts of at least `num_tokens` tokens."""
        if self.num_keys <= num_needles:
            raise UserError(
                f"{type(self).__name__}.num_keys {self.num_keys} must be more than the "
                f"{num_needles} needles: the others are the haystack"
            )
        rng = np.random.default_rng(seed)
        shape = (num_rows, self.num_keys)
        value_of = self.num_keys + rng.integers(self.num_values, size=shape)
        shuffled = rng.permuted(np.indices(shape)[1], axis=1)
        planted, others = np.split(shuffled, [num_needles], axis=1)
        choices = rng.integers(others.shape[1], size=(num_rows, -(-num_tokens // self.fact_size)))
        drawn = np.take_along_axis(others, choices, axis=1)
        values = [np.take_along_axis(value_of, keys, axis=1) for keys in (planted, drawn)]
        facts, haystack = map(self.facts, [rng, rng], (planted, drawn), values)
        return Needles(facts, haystack, self.questions(rng, planted), values[0])


class SyntheticRows:
    """A random-access source of `num_rows` rows; row i is a pure function of (seed, i). Fields as
    in `ttcd_jax.data.packing`, without segment ids, and `distance`; `loss_mask` is where it is."""

    def __init__(self, config: SyntheticConfig, *, seed: int, num_rows: int) -> None:
        self.config, self._seed, self._num_rows = config, seed, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        tokens, targets, distance = self.config.row(np.random.default_rng([self._seed, index]))
        fields = {"tokens": tokens, "targets": targets, "distance": distance}
        places = np.arange(tokens.size, dtype=np.int32)
        return fields | {"positions": places, "loss_mask": distance > 0}
