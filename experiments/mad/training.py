"""Trains the jobs of a sweep that are not recorded yet, and shows its progress."""

import functools
import sys
import time
from pathlib import Path
from typing import Any

from ttcd_kernels import measure

from experiments.mad.config import Job, MADSweepConfig, hyper, jobs
from experiments.mad.models import mad_config, mad_problem
from experiments.mad.records import Records
from experiments.mad.report import best_run
from experiments.mad.sweep_loop import train_runs
from experiments.mad.tasks.instances import instances
from ttcd_jax import units


def train_jobs(config: MADSweepConfig, folder: Path) -> None:
    """Every job that is neither recorded in `folder` nor claimed by another process."""
    records, every_job = Records(folder / "records"), jobs(config)
    pending = [job for job in every_job if not records.has(job)]
    done = len(every_job) - len(pending)
    print(f"{folder}: {done} of {len(every_job)} recorded", flush=True)
    progress, rows = _Progress(pending), functools.lru_cache(maxsize=1)(instances)
    for job in pending:
        with records.claim(job) as is_ours:
            progress.waiting.remove(job)
            if is_ours:
                progress.start(job)
                record = _train(config, job, rows, progress)
                records.write(job, record)
                progress.finish(record)


def _train(config: MADSweepConfig, job: Job, rows: Any, progress: "_Progress") -> dict[str, Any]:
    """Trains one job; returns its record."""
    task = job.setting.config
    model = mad_config(
        job.method,
        task,
        dim=config.dim,
        mlp_dim=config.mlp_dim,
        init_std=config.init_std,
        precision=config.precision,
    )
    start = time.monotonic()
    outcomes = train_runs(
        config.recipe,
        mad_problem(task, model),
        rows(task, seed=config.data_seed, num_train=job.num_train, num_test=config.num_test),
        hyper(config),
        budget_bytes=measure.usable_bytes(),
        on_evaluation=progress.show,
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
        "runs": [outcome._asdict() for outcome in outcomes],
    }


class _Progress:
    """A line per finished job and, on a terminal, one per evaluation; the time left is that of the
    tokens left at the speed so far."""

    def __init__(self, pending: list[Job]) -> None:
        self.waiting, self._total = list(pending), len(pending)
        self._seconds, self._tokens = 0.0, 0.0

    def start(self, job: Job) -> None:
        self._job, self._since = job, time.monotonic()
        self._show_live(f"{job.name}: compiling")

    def show(self, done: float, accuracy: float) -> None:
        """`done` is the finished share of the job."""
        left = self._left(done)
        self._show_live(f"{self._job.name}: {done:.0%}, accuracy {accuracy:.3f}, {left}")

    def finish(self, record: dict[str, Any]) -> None:
        score, best = "no run stayed finite", best_run(record)
        if best is not None:
            score = f"accuracy {best['metrics']['macro_accuracy']:.3f} at rate {best['rate']:g}, "
            score += f"decay {best['weight_decay']:g}"
        elapsed = time.monotonic() - self._since
        left = f", {self._left(1.0)}" if self.waiting else ""
        self._seconds += elapsed
        self._tokens += _tokens(self._job)
        self._show_live("")
        number = f"[{self._total - len(self.waiting)}/{self._total}]"
        print(f"{number} {self._job.name}: {score}, {elapsed:.0f} s{left}", flush=True)

    def _show_live(self, text: str) -> None:
        if sys.stdout.isatty():
            print(f"\r\x1b[K{text}", end="", flush=True)

    def _left(self, done: float) -> str:
        seconds, tokens = self._seconds + time.monotonic() - self._since, _tokens(self._job)
        left = (1 - done) * tokens + sum(map(_tokens, self.waiting))
        return f"{units.clock(left * seconds / (self._tokens + done * tokens))} left"


def _tokens(job: Job) -> float:
    """Tokens that a job trains on, in units of the batch size, which all jobs share."""
    return job.num_steps * job.setting.config.num_positions
