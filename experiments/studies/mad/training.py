"""Trains the jobs of a sweep that are not recorded yet, and shows its progress."""

import functools
import sys
import time
from pathlib import Path
from typing import Any

from ttcd_kernels import measure

from experiments.studies.mad.config import DATA_SEED, Job, MADSweepConfig, hyper, jobs
from experiments.studies.mad.models import mad_config, mad_problem
from experiments.studies.mad.records import Record, claim, record_path, write
from experiments.studies.mad.report import best_run
from experiments.studies.mad.sweep import train_runs
from experiments.studies.mad.tasks.instances import instances
from ttcd_jax import units


def train_jobs(config: MADSweepConfig, folder: Path) -> None:
    """Trains every job neither recorded in `folder` nor claimed by another process. Prints a line
    per finished job; the time left is that of the tokens left at the speed so far."""
    every_job = jobs(config)
    pending = [job for job in every_job if not record_path(folder, job).exists()]
    print(f"{folder}: {len(every_job) - len(pending)} of {len(every_job)} recorded", flush=True)
    rows = functools.lru_cache(maxsize=1)(instances)
    start, work_done = time.monotonic(), 0
    for number, job in enumerate(pending, 1):
        path = record_path(folder, job)
        with claim(path) as is_ours:
            if not is_ours:
                continue
            record = _train(config, job, rows)
            write(path, record)
        work_done += job.work
        work_left = sum(later.work for later in pending[number:])
        seconds_left = (time.monotonic() - start) * work_left / work_done
        left = f", {units.clock(seconds_left)} left" if work_left else ""
        line = f"{job.name}: {_result(record)}, {record['seconds']:.0f} s{left}"
        _show_live("")
        print(f"[{number}/{len(pending)}] {line}", flush=True)


def _train(config: MADSweepConfig, job: Job, rows: Any) -> Record:
    """Trains one job; returns its record."""
    task = job.setting.config
    fields = {"init_std": config.init_std, "precision": config.precision}
    model = mad_config(job.method, task, corrects_errors=config.corrects_errors, **fields)
    start = time.monotonic()
    _show_live(f"{job.name}: compiling")
    runs = train_runs(
        config.recipe,
        mad_problem(task, model),
        rows(task, seed=DATA_SEED, num_train=job.num_train, num_test=config.num_test),
        hyper(config),
        budget_bytes=measure.usable_bytes(),
        on_evaluation=lambda done, accuracy: _show_live(
            f"{job.name}: {done:.0%}, accuracy {accuracy:.3f}"
        ),
    )
    return {
        "task": task.task,
        "setting": job.setting.name,
        "method": job.method,
        "data": task.to_dict(),
        "num_train": job.num_train,
        "num_test": config.num_test,
        "published_num_train": job.setting.num_train,
        "epochs": job.num_epochs,
        "steps": job.num_steps,
        "recipe": config.recipe.to_dict(),
        "model": model.to_dict(),
        "environment": measure.environment(),
        "seconds": round(time.monotonic() - start, 1),
        "runs": runs,
    }


def _result(record: Record) -> str:
    best = best_run(record)
    if best is None:
        return "no run stayed finite"
    accuracy = f"accuracy {best['metrics']['macro_accuracy']:.3f}"
    return f"{accuracy} at rate {best['rate']:g}, decay {best['weight_decay']:g}"


def _show_live(text: str) -> None:
    """On a terminal, replaces the current line."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{text}", end="", flush=True)
