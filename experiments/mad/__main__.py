"""Trains and scores the MAD sweep: all hyperparameter runs of a setting and method at once.

    python -m experiments.mad --gin=mad/default.gin [--param='MADSweepConfig.settings="all"' ...]
                              [--run_dir=DIR] [--beside=DIR ...] [--dry_run]

Each finished setting and method is one file in DIR/records; the same command goes on after an
interruption, and commands that run at the same time share the work. At the end it prints the tables
of what is there, also into DIR/tables.txt, and draws DIR/curves.png. Another recipe needs another
directory; other tasks, settings or methods may be added to this one.
"""

import functools
import sys
import time
from pathlib import Path

from absl import flags

from experiments import cli
from ttcd_jax import units

FLAGS = flags.FLAGS
flags.DEFINE_string("gin", "mad/default.gin", "A file in experiments/configs/, or a path.")
flags.DEFINE_multi_string("param", [], "A binding that overrides the file, as Class.field=value.")
flags.DEFINE_string("run_dir", None, "Where records lie; default: runs/mad-<name of the gin file>.")
flags.DEFINE_multi_string(
    "beside", [], "Another sweep's directory: tables and picture show its records, too."
)
flags.DEFINE_bool("dry_run", False, "Print what would be trained; train and write nothing.")


def main(argv: list[str]) -> None:
    from experiments.gin_loading import load_config
    from experiments.mad.config import MADSweepConfig, jobs
    from experiments.mad.picture import draw_curves
    from experiments.mad.records import Records, check_beside, gather
    from ttcd_jax.files import write_whole
    from ttcd_jax.run.directory import RunDirectory

    config = load_config(MADSweepConfig, FLAGS.gin, FLAGS.param, config_dir=cli.CONFIG_DIR)
    if FLAGS.dry_run:
        _print_plan(config)
        return
    cli.use_every_core()
    beside = [Path(other) for other in FLAGS.beside]
    check_beside(beside)
    run_dir = RunDirectory(FLAGS.run_dir or Path("runs") / f"mad-{Path(FLAGS.gin).stem}")
    with run_dir.lock(waits=True):
        run_dir.claim(config.comparable(), " ".join(sys.argv) + "\n", {"seed": config.data_seed})
    records = Records(run_dir.path / "records")
    todo = jobs(config)
    pending = [job for job in todo if not records.has(job)]
    print(f"{run_dir.path}: {len(todo) - len(pending)} of {len(todo)} recorded", flush=True)
    progress = _Progress(config, pending)
    for job in pending:
        with records.taking(job) as is_ours:
            if not is_ours:
                progress.skip(job)
                continue
            progress.start(job)
            record = _train(config, job, progress)
            records.write(job, record)
            progress.finish(record)
    found = gather(run_dir.path, beside)
    if not found:
        return  # Other processes are at everything there is.
    tables = _tables(found)
    with run_dir.lock(waits=True):
        write_whole(run_dir.path / "tables.txt", tables)
        print(tables)
        draw_curves(run_dir.path / "curves.png", found)


def _train(config, job, progress) -> dict:
    """Trains one job; returns its record."""
    from ttcd_kernels import measure

    from experiments.mad.config import hyper, model_of
    from experiments.mad.problem import mad_problem
    from experiments.mad.sweep_loop import train_runs

    model, task = model_of(config, job), job.setting.config
    budget = config.memory_gib * 2**30 if config.memory_gib else measure.usable_bytes()
    start = time.monotonic()
    outcomes = train_runs(
        config.recipe,
        mad_problem(task, model),
        _splits(task, config.data_seed, job.num_train, config.num_test),
        hyper(config),
        budget_bytes=int(budget),
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
        "steps": job.num_epochs * config.recipe.steps_per_epoch(job.num_train),
        "recipe": config.recipe.to_dict(),
        "model": model.to_dict(),
        "environment": measure.environment(),
        "seconds": round(time.monotonic() - start, 1),
        "runs": [outcome._asdict() for outcome in outcomes],
    }


@functools.lru_cache(maxsize=1)
def _splits(task, seed: int, num_train: int, num_test: int):
    from experiments.mad.tasks.instances import instances

    return instances(task, seed=seed, num_train=num_train, num_test=num_test)


def _tables(records: list[dict]) -> str:
    from experiments.mad import report as mad_report
    from ttcd_jax.eval.report import format_table

    parts = [
        "\nMAD: best test accuracy over the runs of a setting, mean over settings, in percent",
        format_table(mad_report.score_table(records)),
        *mad_report.footnotes(records),
        "\nWhat the memory holds (best run of each setting, mean over settings)",
        format_table(mad_report.memory_table(records)),
    ]
    return "\n".join(parts) + "\n"


def _print_plan(config) -> None:
    from experiments.mad.config import hyper, jobs

    todo, runs = jobs(config), len(hyper(config).rate)
    settings = {(job.setting.config.task, job.setting.name) for job in todo}
    for job in todo:
        steps = job.num_epochs * config.recipe.steps_per_epoch(job.num_train)
        print(f"{job.name}: {runs} runs of {steps:,} steps ({job.num_epochs} epochs)")
    print(
        f"{len(settings)} settings, {runs * len(settings)} runs per method, "
        f"{runs * len(todo)} runs in all"
    )


class _Progress:
    """One line per finished job and, on a terminal, a live one per evaluation; the time left from
    the tokens that are left and the speed so far, method by method where it is known."""

    def __init__(self, config, pending) -> None:
        self._batch, self._recipe = config.recipe.batch_size, config.recipe
        self._pending = list(pending)
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, float] = {}
        self._total = len(self._pending)

    def skip(self, job) -> None:
        """Another process does it, or has done it since."""
        self._pending.remove(job)

    def start(self, job) -> None:
        self._job, self._since = job, time.monotonic()
        if sys.stdout.isatty():
            print(f"\r\x1b[K{job.name}: compiling", end="", flush=True)

    def show(self, evaluation) -> None:
        if not sys.stdout.isatty():
            return
        done = (evaluation.group + evaluation.epoch / evaluation.epochs) / evaluation.groups
        print(
            f"\r\x1b[K{self._job.name}: epoch {evaluation.epoch}/{evaluation.epochs}, "
            f"accuracy {evaluation.best_accuracy:.3f}, {self._left(done)}",
            end="",
            flush=True,
        )

    def finish(self, record: dict) -> None:
        from experiments.mad.report import best_run

        job, elapsed = self._job, time.monotonic() - self._since
        self._seconds[job.method] = self._seconds.get(job.method, 0.0) + elapsed
        self._tokens[job.method] = self._tokens.get(job.method, 0.0) + self._work(job)
        self._pending.remove(job)
        best = best_run(record)
        score = "no run stayed finite"
        if best is not None:
            score = f"accuracy {best['metrics']['macro_accuracy']:.3f} at rate {best['rate']:g}, "
            score += f"decay {best['weight_decay']:g}"
        start = "\r\x1b[K" if sys.stdout.isatty() else ""
        number = self._total - len(self._pending)
        print(
            f"{start}[{number}/{self._total}] {job.name}: {score}, {elapsed:.0f} s"
            + (f", {self._left(0.0)}" if self._pending else ""),
            flush=True,
        )

    def _work(self, job) -> float:
        steps = job.num_epochs * self._recipe.steps_per_epoch(job.num_train)
        return steps * self._batch * job.setting.config.num_positions

    def _left(self, share_done: float) -> str:
        """`share_done` of the first pending job is behind us."""
        seconds, tokens = dict(self._seconds), dict(self._tokens)
        if share_done:
            method = self._job.method
            spent = time.monotonic() - self._since
            seconds[method] = seconds.get(method, 0.0) + spent
            tokens[method] = tokens.get(method, 0.0) + share_done * self._work(self._job)
        usual = sum(seconds.values()) / sum(tokens.values())
        left = 0.0
        for index, job in enumerate(self._pending):
            known = job.method in tokens
            per_token = seconds[job.method] / tokens[job.method] if known else usual
            left += per_token * self._work(job) * (1 - share_done * (index == 0))
        return f"{units.clock(left)} left"


if __name__ == "__main__":
    cli.run(main)
