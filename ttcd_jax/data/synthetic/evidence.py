"""Evidence: the value stands before its key, where only the longer window sees it.

A row states facts, `. . v . . . k .`, then asks for their keys. At a key a window as long as a fact
sees its value and no other, one of gap_min tokens none; the value never follows its key, so a
memory of which token followed which does not store it. A question is a key after fillers; its
target is the value, and the row goes on without it. num_between fillers hold all questions beyond
the reach of attention: a memory has to bind what the long window sees to what the short one will
see again. Keys and values of a row are drawn without replacement: who knows which values it has,
and not whose, is right in 1 / num_facts of the questions; who does not, in 1 / num_values.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from ttcd_jax.config import NonNegative, Positive
from ttcd_jax.data.synthetic.rows import Fields, Rng, SyntheticConfig
from ttcd_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvidenceConfig(SyntheticConfig):
    """`num_facts` facts per row, values `gap_min` .. `gap_max` tokens before their keys, all of
    which are asked for, in any order. The last token ids are `num_fillers` fillers; `num_between`
    of them stand between facts and questions, and `num_before` before the key of a question."""

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
