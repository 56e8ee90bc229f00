"""Trains and scores the MAD sweep: all hyperparameter runs of a setting and method at once.

    python -m experiments.mad --gin=mad/default.gin [--param='MADSweepConfig.settings="all"' ...]
                              [--run_dir=DIR] [--beside=DIR ...] [--records=FILE] [--dry_run]

Each finished setting and method is one file in DIR/records; the same command continues after an
interruption, and commands that run at the same time share the work. At the end it prints the tables
of all records, also into DIR/tables.txt, and draws DIR/curves.*.svg. Another recipe needs another
directory; other tasks, settings or methods may be added to this one. --beside shows sweeps of other
tasks in the same tables, experiments.report the scores of several directories on one page.
"""

import os
import sys
from pathlib import Path

from absl import flags

from ttcd_jax.commands import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("gin", "mad/default.gin", "A file in experiments/configs/, or a path.")
flags.DEFINE_multi_string("param", [], "A binding that overrides the file, as Class.field=value.")
flags.DEFINE_string("run_dir", None, "The folder (default: runs/mad-<name of the gin file>).")
flags.DEFINE_multi_string("beside", [], "The folder of another sweep; repeat for more.")
flags.DEFINE_string("records", None, "Write a JSON line per row, for the tables of pages.")
flags.DEFINE_bool("dry_run", False, "Print the jobs; train and write nothing.")


def main(argv: list[str]) -> None:
    import jax

    from experiments.studies.mad import sweep
    from experiments.studies.mad.records import (
        draw_curves,
        gather,
        record_path,
        tables,
        write_records,
    )
    from ttcd_jax.config import check_text
    from ttcd_jax.files import write_whole
    from ttcd_jax.run.bindings import load_config
    from ttcd_jax.run.directory import RunDirectory

    config = load_config(sweep.MADSweepConfig, FLAGS.gin, FLAGS.param, config_dir=cli.CONFIG_DIR)
    if FLAGS.dry_run:
        print(sweep.plan(config))
        return
    jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))  # a device each
    path = Path(FLAGS.run_dir or f"runs/mad-{Path(FLAGS.gin).stem}")
    check_text("--run_dir", str(path))  # refused in a bucket
    run_dir = RunDirectory(path)
    run_dir.check_free()
    beside = [Path(x) for x in FLAGS.beside]
    gather(beside, [record_path(path, job) for job in sweep.jobs(config)])
    with run_dir.lock(waits=True):
        command, data = " ".join(sys.argv) + "\n", {"seed": sweep.DATA_SEED}
        run_dir.claim(config.to_dict(), command, data, layout=sweep.SELECTION)
    sweep.train_jobs(config, run_dir.path)
    if records := gather([path, *beside]):  # else others train every job
        with run_dir.lock(waits=True):
            write_whole(run_dir.path / "tables.txt", text := tables(records))
            print(text)
            draw_curves(run_dir.path / "curves.svg", records)
        if FLAGS.records is not None:
            write_records(FLAGS.records, records, cli.command_line("mad"))


if __name__ == "__main__":
    cli.run(main)
