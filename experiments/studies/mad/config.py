"""The configuration of a MAD sweep, root of the files in configs/mad/, and its jobs."""

import dataclasses
import itertools
from typing import Annotated, Literal, NamedTuple

import numpy as np

from experiments.studies.mad.models import MAD_METHODS, MADMethod
from experiments.studies.mad.sweep import Hyper, RecipeConfig
from experiments.studies.mad.tasks.settings import TASKS, Setting, TaskName, settings
from ttcd_jax.config import DISTINCT, Bound, Config, NonNegativeFloat, Positive, PositiveFloat
from ttcd_jax.precision import Precision

# Fields that choose the jobs and change no result: records of one directory may differ in them.
SELECTION = ("tasks", "settings", "methods")
_Seed = Annotated[int, Bound("in 0 .. 2^32 - 1", lambda value: 0 <= value < 2**32)]
DATA_SEED = 12345  # the seed of the published rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class MADSweepConfig(Config):
    """A sweep: every setting of `tasks` is trained with every method, and with all combinations of
    `rates`, `weight_decays` and `seeds` in one compiled program.

    `num_train` lowers the number of training rows. `init_std` is that of all normal
    initialisations; with a larger one recall is learned from far fewer rows
    (experiments/RESULTS.md). `corrects_errors`: IP-TTCD by the delta rule, as in the small recipes.
    """

    recipe: RecipeConfig
    precision: Precision
    tasks: Annotated[tuple[TaskName, ...], DISTINCT] = TASKS
    settings: Literal["default", "all"] = "default"
    methods: Annotated[tuple[MADMethod, ...], DISTINCT] = MAD_METHODS
    rates: Annotated[tuple[NonNegativeFloat, ...], DISTINCT] = (1e-4, 5e-4, 1e-3)
    weight_decays: Annotated[tuple[NonNegativeFloat, ...], DISTINCT] = (0.0, 0.1)
    seeds: Annotated[tuple[_Seed, ...], DISTINCT] = (12345,)
    num_train: Positive | None = None
    num_test: Positive = 1280
    init_std: PositiveFloat = 0.02
    corrects_errors: bool = False


class Job(NamedTuple):
    """A setting and a method: its runs are trained together and recorded in one file."""

    setting: Setting
    method: MADMethod
    num_train: int
    num_epochs: int
    num_steps: int

    @property
    def name(self) -> str:
        return f"{self.setting.config.task}.{self.setting.name}.{self.method}"

    @property
    def work(self) -> int:
        """Steps times positions per row, proportional to tokens: all jobs share the batch size."""
        return self.num_steps * self.setting.config.num_positions


def jobs(config: MADSweepConfig) -> list[Job]:
    """All jobs by setting; the methods of a setting are adjacent, since they share the rows."""
    stop = None if config.settings == "all" else 1
    chosen = [setting for task in config.tasks for setting in settings(task)[:stop]]
    result = []
    for setting, method in itertools.product(chosen, config.methods):
        num_train = min(setting.num_train, config.num_train or setting.num_train)
        epochs = config.recipe.num_epochs(num_train)
        num_steps = epochs * config.recipe.steps_per_epoch(num_train)
        result.append(Job(setting, method, num_train, epochs, num_steps))
    return result


def hyper(config: MADSweepConfig) -> Hyper:
    """The hyperparameters of a job's runs, the same for every job."""
    grid = itertools.product(config.rates, config.weight_decays, config.seeds)
    return Hyper(*map(np.array, zip(*grid, strict=True)))


def plan(config: MADSweepConfig) -> str:
    """A line per job, and the number of runs."""
    every_job, runs = jobs(config), len(hyper(config).rate)
    num_settings = len({job.setting for job in every_job})
    lines = [
        f"{job.name}: {runs} runs of {job.num_steps:,} steps ({job.num_epochs} epochs)"
        for job in every_job
    ]
    total = f"{runs * num_settings} runs per method, {runs * len(every_job)} runs in all"
    return "\n".join([*lines, f"{num_settings} settings, {total}"])
