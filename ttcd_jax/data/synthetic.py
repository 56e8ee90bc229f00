"""Rows of facts and questions that are drawn from (seed, index), not read.

`RecallConfig`: key-value pairs. `EvidenceConfig`: a value stands before its key, where only the
longer window sees it.
"""

import abc
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from ttcd_jax.config import AtLeast, Config, NonNegative, Positive
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


class RecallConfig(SyntheticConfig):
    """Rows `k v k v ...` of `num_slots` pairs: every slot draws a key, and within a row a key keeps
    its value, which is the target where the key comes again. The distance is counted back to the
    key's last value. Beyond the reach of the windows only a memory can recall it."""

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


class EvidenceConfig(SyntheticConfig):
    """`num_facts` facts per row, `. . v . . . k .`, values `gap_min` .. `gap_max` tokens before
    their keys, then questions for all of them, in any order. At a key a window as long as a fact
    sees its value and no other, one of gap_min tokens none; the value never follows its key, so a
    memory of which token followed which does not store it.

    The last token ids are `num_fillers` fillers; `num_between` of them stand between facts and
    questions, beyond the reach of attention, and `num_before` before the key of a question, whose
    target is the value. Keys and values of a row are drawn without replacement: who knows which
    values it has, and not whose, is right in 1 / num_facts of the questions.
    """

    kind: ClassVar[str] = "evidence"
    num_facts: Positive
    num_fillers: Positive
    gap_min: Positive = 5
    gap_max: Positive = 14
    num_between: NonNegative = 32
    num_before: NonNegative = 3

    def validate(self) -> None:
        pairs = ("gap_min", "gap_max"), ("num_facts", "num_keys"), ("num_facts", "num_values")
        for low, high in pairs:
            if (least := getattr(self, low)) > (most := getattr(self, high)):
                raise UserError(f"EvidenceConfig.{low} {least} is above {high} {most}: lower it")

    @property
    def fact_size(self) -> int:
        return self.gap_max + 2

    @property
    def seq_len(self) -> int:
        return self.num_facts * (self.fact_size + self.num_before + 1) + self.num_between

    @property
    def vocab_size(self) -> int:
        return super().vocab_size + self.num_fillers

    def row(self, rng: Rng) -> Fields:
        """The keys of facts are questions as well, whose values the long window sees."""
        keys, values, asked = (
            rng.permutation(size)[None, : self.num_facts]
            for size in (self.num_keys, self.num_values, self.num_facts)
        )
        facts = self.facts(rng, keys, self.num_keys + values)
        between = self._fillers(rng, 1, self.num_between)
        questions = self.questions(rng, keys[:, asked[0]], is_far=True).reshape(1, -1)
        tokens = np.hstack([facts, between, questions])[0]
        places = np.flatnonzero(tokens < self.num_keys)
        is_value = (self.num_keys <= tokens) & (tokens < super().vocab_size)
        stated = np.flatnonzero(is_value)[np.append(np.arange(self.num_facts), asked)]
        targets, distance = np.roll(tokens, -1), np.zeros_like(tokens)
        targets[places], distance[places] = tokens[stated], places - stated
        return tokens, targets, distance

    def facts(self, rng: Rng, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        facts = self._fillers(rng, *keys.shape, self.fact_size)
        gaps = rng.integers(self.gap_min, self.gap_max + 1, size=(*keys.shape, 1))
        facts[..., self.gap_max] = keys
        np.put_along_axis(facts, self.gap_max - gaps, values[..., None], axis=2)
        return facts.reshape(len(keys), -1)

    def questions(self, rng: Rng, keys: np.ndarray, is_far: bool = False) -> np.ndarray:
        """Far from all values, if they are not already."""
        before = self._fillers(rng, *keys.shape, self.num_between * (not is_far) + self.num_before)
        return np.concatenate([before, super().questions(rng, keys)], axis=2)

    def _fillers(self, rng: Rng, *shape: int) -> np.ndarray:
        return rng.integers(super().vocab_size, self.vocab_size, size=shape, dtype=np.int32)
