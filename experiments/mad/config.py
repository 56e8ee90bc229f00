"""What a MAD sweep is: the root of the files in configs/mad/, and the jobs it consists of."""

import dataclasses
import itertools
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.mad.models import MAD_METHODS, MADMethod, mad_config
from experiments.mad.problem import WINDOWS
from experiments.mad.sweep import Hyper, RecipeConfig
from experiments.mad.tasks.config import TaskName
from experiments.mad.tasks.settings import NUM_TEST, TASKS, Setting, settings
from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.models.catalog import TransformerConfig
from ttcd_jax.precision import Precision

# Fields that choose what is trained, or where it fits, and leave every result as it is.
_SELECTION = ("tasks", "settings", "methods", "memory_gib")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MADSweepConfig(Config):
    """Every setting of `tasks` is trained with every method and with each of `rates` times
    `weight_decays` times `seeds`, which are one compiled program.

    `num_train` lowers the number of training rows, `num_test` is the number of test rows: reduced
    budgets, told in every table. `init_std` belongs to all normal initialisations; with a larger
    one recall is learned from far fewer rows (experiments/RESULTS.md). `memory_gib`: what a device
    may use, default what it has.
    """

    recipe: RecipeConfig
    precision: Precision
    tasks: tuple[TaskName, ...] = TASKS
    settings: Literal["default", "all"] = "default"
    methods: tuple[MADMethod, ...] = MAD_METHODS
    rates: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    weight_decays: tuple[float, ...] = (0.0, 0.1)
    seeds: tuple[int, ...] = (12345,)
    data_seed: int = 12345
    num_train: int | None = None
    num_test: int = NUM_TEST
    dim: int = 128
    mlp_dim: int = 256
    init_std: float = 0.02
    memory_gib: float | None = None

    def validate(self) -> None:
        for name in ("tasks", "methods", "rates", "weight_decays", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise UserError(
                    f"MADSweepConfig.{name} {values} must hold something, and nothing twice"
                )
        for name in ("num_train", "num_test", "dim", "mlp_dim", "init_std", "memory_gib"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"MADSweepConfig.{name} {value} must be positive")
        for name, lowest in (("rates", 0.0), ("weight_decays", 0.0), ("seeds", 0)):
            if min(getattr(self, name)) < lowest:
                raise UserError(f"MADSweepConfig.{name} {getattr(self, name)} has a negative one")

    def comparable(self) -> dict[str, Any]:
        """What all records of one directory have in common."""
        return {name: x for name, x in self.to_dict().items() if name not in _SELECTION}


class Job(NamedTuple):
    """A setting and a method: what is trained at once and recorded as one."""

    setting: Setting
    method: MADMethod
    num_train: int
    num_epochs: int

    @property
    def name(self) -> str:
        return f"{self.setting.config.task}.{self.setting.name}.{self.method}"


def jobs(config: MADSweepConfig) -> list[Job]:
    """Setting after setting, its methods beside each other: they share the rows."""
    found = []
    for task in config.tasks:
        chosen = settings(task) if config.settings == "all" else settings(task)[:1]
        for setting, method in itertools.product(chosen, config.methods):
            num_train = min(setting.num_train, config.num_train or setting.num_train)
            epochs = config.recipe.num_epochs(num_train)
            found.append(Job(setting, method, num_train, epochs))
    return found


def hyper(config: MADSweepConfig) -> Hyper:
    """The runs of every job."""
    grid = itertools.product(config.rates, config.weight_decays, config.seeds)
    rates, weight_decays, seeds = zip(*grid, strict=True)
    return Hyper(np.array(rates), np.array(weight_decays), np.array(seeds))


def model_of(config: MADSweepConfig, job: Job) -> TransformerConfig:
    task = job.setting.config
    return mad_config(
        job.method,
        vocab_size=task.vocab_size,
        window=WINDOWS[task.task],
        dim=config.dim,
        mlp_dim=config.mlp_dim,
        init_std=config.init_std,
        precision=config.precision,
    )
