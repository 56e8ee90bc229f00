"""The commands. Of a checkout also the studies: `experiments.mad` is `experiments.studies.mad`."""

from pathlib import Path

__path__.append(str(Path(__file__).parent / "studies"))
