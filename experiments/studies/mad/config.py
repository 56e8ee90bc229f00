"""The configuration of a MAD sweep, root of the files in configs/mad/, and its jobs."""

import dataclasses
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from ttcd_kernels import measure

from experiments.studies.mad import records
from experiments.studies.mad.models import mad_config, mad_problem
from experiments.studies.mad.records import MAD_METHODS, Job, MADMethod, RecipeConfig, Record
from experiments.studies.mad.report import best_run
from experiments.studies.mad.sweep import Hyper, train_runs
from experiments.studies.mad.tasks import TASKS, TaskName, instances, settings
from ttcd_jax.config import DISTINCT, Bound, Config, NonNegativeFloat, Positive, PositiveFloat
from ttcd_jax.precision import Precision
from ttcd_jax.terminal import Progress

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


def jobs(config: MADSweepConfig) -> list[Job]:
    """All jobs by setting; the methods of a setting are adjacent, since they share the rows."""
    stop = None if config.settings == "all" else 1
    chosen = [setting for task in config.tasks for setting in settings(task)[:stop]]
    result = []
    for (name, data, num_rows), method in itertools.product(chosen, config.methods):
        num_train = min(num_rows, config.num_train or num_rows)
        epochs = config.recipe.num_epochs(num_train)
        sizes = {"num_train": num_train, "num_test": config.num_test, "epochs": epochs}
        sizes |= {"steps": epochs * config.recipe.steps_per_epoch(num_train)}
        fields: dict[str, Any] = {"init_std": config.init_std, "precision": config.precision}
        model = mad_config(method, data, corrects_errors=config.corrects_errors, **fields)
        fields = {"recipe": config.recipe, "model": model, "published_num_train": num_rows}
        names = {"task": data.task, "setting": name, "method": method, "data": data}
        result.append(Job(**names, **sizes, **fields))
    return result


def hyper(config: MADSweepConfig) -> Hyper:
    """The hyperparameters of a job's runs, the same for every job."""
    grid = itertools.product(config.rates, config.weight_decays, config.seeds)
    return Hyper(*map(np.array, zip(*grid, strict=True)))


def plan(config: MADSweepConfig) -> str:
    """A line per job, and the number of runs."""
    every_job, runs = jobs(config), len(hyper(config).rate)
    lines = [f"{x.name}: {runs} runs of {x.steps:,} steps ({x.epochs} epochs)" for x in every_job]
    num_settings = len(every_job) // len(config.methods)
    total = f"{runs * num_settings} runs per method, {runs * len(every_job)} runs in all"
    return "\n".join([*lines, f"{num_settings} settings, {total}"])


def train_jobs(config: MADSweepConfig, folder: Path) -> None:
    """Trains every job neither recorded in `folder` nor claimed by another process. Prints a line
    per finished job; the time left is that of the tokens left at the speed of all processes."""
    every_job = jobs(config)
    pending = [job for job in every_job if not records.record_path(folder, job).exists()]
    print(f"{folder}: {len(every_job) - len(pending)} of {len(every_job)} recorded", flush=True)
    rows = functools.lru_cache(maxsize=1)(instances)
    # Steps times positions per row, proportional to tokens: all jobs share the batch size.
    work = [*itertools.accumulate(job.steps * job.data.num_positions for job in pending)]
    progress = Progress(sys.stdout, work[-1] if work else 0, start=0)
    for number, job in enumerate(pending, 1):
        path = records.record_path(folder, job)
        with records.claim(path) as is_ours:
            if not is_ours:
                continue
            record = _trained(config, job, rows, progress)
            records.write(path, record)
        line = f"[{number}/{len(pending)}] {job.name}: {best_run(record) or 'no run stayed finite'}"
        left = progress.left(work[number - 1]) if number < len(pending) else ""
        progress.show(f"{line}, {record.seconds:.0f} s{left and f', {left}'}", is_last=True)


def _trained(config: MADSweepConfig, job: Job, rows: Any, progress: Progress) -> Record:
    """The record of a job."""

    def show(text: str) -> None:
        if progress.is_live:
            progress.show(f"{job.name}: {text}")

    start = time.monotonic()
    show("compiling")
    runs = train_runs(
        config.recipe,
        mad_problem(job.data, job.model),
        rows(job.data, seed=DATA_SEED, num_train=job.num_train, num_test=config.num_test),
        hyper(config),
        budget_bytes=measure.usable_bytes(),
        on_evaluation=lambda done, accuracy: show(f"{done:.0%}, accuracy {accuracy:.3f}"),
    )
    seconds = round(time.monotonic() - start, 1)
    return Record(**vars(job), environment=measure.environment(), seconds=seconds, runs=tuple(runs))
