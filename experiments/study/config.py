"""The configuration of a study."""

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated

from ttcd_jax.config import DISTINCT, Config, NonNegative, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.eval.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig(Config):
    """`recipes`: .gin files of runs that differ in their method alone, the first of which is the
    base of all differences; each is trained with all `seeds`, those of `once` with the first.

    All are evaluated by `evaluations` on the held-out text of every corpus they are trained on, cut
    into pieces of `piece_bytes`, at most `max_pieces` of them, taken evenly.
    """

    recipes: Annotated[tuple[str, ...], DISTINCT]
    once: tuple[str, ...] = ()
    seeds: Annotated[tuple[NonNegative, ...], DISTINCT] = (0, 1, 2)
    evaluations: tuple[Task, ...] = ()
    piece_bytes: Positive = 4096
    max_pieces: Positive = 16

    def validate(self) -> None:
        names = [PurePath(file).stem for file in (*self.recipes, *self.once)]
        if len(set(names)) < len(names):
            raise UserError(f"two recipes of the study have one name: {', '.join(names)}")

    def files(self) -> dict[str, str]:
        """The .gin file of every recipe, by name."""
        return {PurePath(file).stem: file for file in (*self.recipes, *self.once)}

    def chosen(self, only: Sequence[str] = ()) -> list[tuple[str, int]]:
        """(recipe, seed) of all runs, or of the recipes `only`; all first seeds come first."""
        names = self.files()
        for name in only:
            if name not in names:
                raise UserError(f"--only={name} is none of the study's {', '.join(names)}")
        single = {PurePath(file).stem for file in self.once}
        return [
            (name, seed)
            for seed in self.seeds
            for name in names
            if (not only or name in only) and (name not in single or seed == self.seeds[0])
        ]
