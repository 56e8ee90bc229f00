"""Trains a model: one .gin file in, one run directory out. The same command resumes an interrupted
run.

    ttcd launch --gin=quickstart.gin [--param='RunConfig.steps=20' ...]
                [--run_dir=DIR] [--change=RunConfig.steps ...]
                [--dry_run | --rehearse [--topology=h100x64]]
                [--distributed=slurm] [--hang_seconds=60]
                [--profile=START:STOP]

SIGTERM, SIGHUP or Ctrl-C finishes the step, saves, and exits with status 75: the same command
resumes, on any number of devices. A second Ctrl-C exits at once. SIGUSR1 saves after the step,
SIGUSR2 traces the next three steps. Of several processes the first prints and writes; when one is
lost, or hangs, the others exit with status 7.
"""

import gc
import signal
import sys
from pathlib import Path
from typing import Any

from absl import flags

from ttcd_jax import terminal
from ttcd_jax.commands import cli
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.run.bindings import find_gin_file, load_config, read_file, read_params

FLAGS = flags.FLAGS
cli.define_distributed()
flags.DEFINE_string("gin", None, "One of `ttcd recipes`, or a path.", required=True)
flags.DEFINE_multi_string("param", [], "A binding that overrides the file, as Class.field=value.")
flags.DEFINE_string("run_dir", None, "The run directory (default: runs/<name of the gin file>).")
flags.DEFINE_multi_string(
    "change", [], "A field, as Class.field, that may differ from the run that is resumed."
)
flags.DEFINE_bool("dry_run", False, "Print parameters, bytes and FLOPs; write nothing.")
flags.DEFINE_bool(
    "rehearse",
    False,
    "Try data, tokenizer, step, memory and the run directory, print what failed; leave nothing.",
)
flags.mark_bool_flags_as_mutual_exclusive(["dry_run", "rehearse"])
flags.DEFINE_string(
    "topology", None, "Devices of --dry_run or --rehearse, as in h100x64 (default: those here)."
)
flags.DEFINE_float(
    "hang_seconds",
    60.0,
    "Of several processes: the time of a step, and 20 times the median, after which one is lost; "
    "10 times as long in a save.",
    lower_bound=1.0,
)
flags.DEFINE_string("profile", None, "START:STOP, the steps to trace into RUN_DIR/profile.")

_OF_A_PLAN = """Prints parameters, bytes and FLOPs of a run, and trains nothing.

    ttcd plan --gin=quickstart.gin [--param='RunConfig.steps=20' ...] [--topology=h100x64]

For the devices of --topology it says the time of a step too. It is `ttcd launch --dry_run`.
"""
RESUME_ME = 75  # EX_TEMPFAIL


def main(argv: list[str]) -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # outside of training they ask for nothing
        signal.signal(number, signal.SIG_IGN)
    is_planned = FLAGS.dry_run or FLAGS.rehearse
    if FLAGS.topology is not None and not is_planned:
        raise UserError(
            "--topology describes the devices of a plan: it goes with --dry_run or --rehearse"
        )
    # Their mistakes are reported before anything slow is imported.
    gin_file = find_gin_file(FLAGS.gin, cli.CONFIG_DIR)
    read_file(gin_file, cli.CONFIG_DIR)
    read_params(FLAGS.param, cli.CONFIG_DIR)
    gc.disable()  # a fifth of the time of imports and of tracing
    with terminal.phase("importing"):
        from ttcd_jax.run import training
        from ttcd_jax.run.config import RunConfig
        from ttcd_jax.run.directory import RunDirectory
        from ttcd_jax.run.start import inherited_model
        from ttcd_jax.train.profile import step_window
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()

    cli.keep_programs()
    path = FLAGS.run_dir or Path("runs") / Path(FLAGS.gin).stem
    # A rehearsal reports a bucket that cannot be reached.
    run_dir = RunDirectory(path, may_be_unreachable=FLAGS.rehearse)
    run_dir.check_imports()  # or a class would be unknown
    options = {"config_dir": cli.CONFIG_DIR, "inherit": inherited_model(run_dir)}
    config = load_config(RunConfig, FLAGS.gin, FLAGS.param, **options)
    if is_planned:
        _plan(config, run_dir)
        return
    window = step_window(FLAGS.profile, config.steps) if FLAGS.profile else range(0)
    cli.connect(FLAGS.hang_seconds)
    options = {"profile": window, "hang_seconds": FLAGS.hang_seconds}
    # The file's text and the parameters, for human readers: a resume reads `config.json`.
    params = "".join(f"# --param {param}\n" for param in FLAGS.param)
    source = gin_file.read_text(encoding="utf-8") + params
    run = training.train_run(config, run_dir.path, source=source, changes=FLAGS.change, **options)
    if run.stopped_by is not None:
        command = cli.command_line("launch")
        terminal.say(
            f"stopped by {run.stopped_by} at step {run.step}, checkpoint saved; run the same "
            f"command to go on: {command}"
        )
        sys.exit(RESUME_ME)


def _plan(config: Any, run_dir: Any) -> None:
    """The run's dry run or rehearsal."""
    from ttcd_jax.commands import plan
    from ttcd_jax.commands.rehearsal import Rehearsal
    from ttcd_jax.run import training

    cli.clean_up_on_sigterm()
    target = None if FLAGS.topology is None else plan.use_topology(FLAGS.topology)
    if FLAGS.rehearse:
        Rehearsal(config, run_dir, target, FLAGS.change).run()
        return
    try:
        is_named = FLAGS.run_dir is not None or run_dir.is_claimed
        training.check(config, run_dir if is_named else None)
    except DataError as error:  # a plan needs shapes alone
        print(f"not checked against its files: {error}", file=sys.stderr)
    plan.print_plan(config, target)


if __name__ == "__main__":
    __doc__ = _OF_A_PLAN if "--dry_run" in sys.argv else __doc__  # for --help
    cli.run(main, options=cli.recipe_options)
