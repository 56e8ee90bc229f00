"""Trains a model: one .gin file in, one run directory out. The same command resumes an interrupted
run.

    python -m experiments.launch --gin=quickstart.gin [--param='RunConfig.steps=20' ...]
                                 [--run_dir=DIR] [--dry_run [--topology=h100x64]]
                                 [--distributed=slurm] [--hang_seconds=60]
                                 [--profile=START:STOP] [--compile_cache=DIR]

A stop by SIGTERM or Ctrl-C finishes the step, saves, and leaves with status 75: run the same
command to go on, on as many devices as you like. A second Ctrl-C leaves at once. SIGUSR2 traces the
next three steps. Of several processes the first speaks and writes; when one is lost, or hangs, the
others leave with status 7.
"""

import contextlib
import shlex
import signal
import sys
from pathlib import Path

from absl import flags

from experiments import cli, processes

FLAGS = flags.FLAGS
flags.DEFINE_string("gin", None, "A file in experiments/configs/, or a path.", required=True)
flags.DEFINE_multi_string("param", [], "A binding that overrides the file, as Class.field=value.")
flags.DEFINE_string("run_dir", None, "The run directory; default: runs/<name of the gin file>.")
flags.DEFINE_bool(
    "dry_run", False, "Print parameters, memory and FLOPs; allocate and write nothing."
)
flags.DEFINE_string(
    "topology", None, "Devices that --dry_run plans for, as in h100x64; default: this machine's."
)
flags.DEFINE_float(
    "hang_seconds",
    60.0,
    "Of several processes: how long a step may take at least, and 20 times the median step, before "
    "one counts as lost.",
    lower_bound=1.0,
)
flags.DEFINE_string(
    "profile", None, "Trace from START to STOP steps done, as START:STOP, into RUN_DIR/profile."
)
flags.DEFINE_string(
    "compile_cache",
    None,
    "Where compiled programs are kept, empty: nowhere; default: JAX_COMPILATION_CACHE_DIR, else "
    "~/.cache/ttcd_jax.",
)

RESUME_ME = 75  # EX_TEMPFAIL


def main(argv: list[str]) -> None:
    import jax

    from experiments import plan
    from experiments.gin_loading import load_config
    from ttcd_jax.errors import UserError
    from ttcd_jax.run import build, start
    from ttcd_jax.run.config import RunConfig
    from ttcd_jax.run.directory import RunDirectory
    from ttcd_jax.sharding.mesh import build_mesh
    from ttcd_jax.train.compilation import keep_programs
    from ttcd_jax.train.profile import step_window
    from ttcd_jax.train.watchdog import Watchdog

    hardware = None if FLAGS.topology is None else plan.use_topology(FLAGS.topology)
    if hardware is not None and not FLAGS.dry_run:
        raise UserError("--topology describes the devices of a plan: it goes with --dry_run")
    keep_programs(FLAGS.compile_cache)
    run_dir = RunDirectory(FLAGS.run_dir or Path("runs") / Path(FLAGS.gin).stem)
    config = load_config(
        RunConfig,
        FLAGS.gin,
        FLAGS.param,
        config_dir=cli.CONFIG_DIR,
        inherit=start.inherited_model(run_dir),
    )
    if hardware is None:  # else the files it names lie elsewhere
        build.check(config)
    window = step_window(FLAGS.profile, config.steps) if FLAGS.profile else range(0)
    if not run_dir.is_claimed and config.start_from is not None:
        start.plan_start(config)
    if FLAGS.dry_run:
        plan.print_plan(config, hardware)
        return
    processes.connect()
    mesh = build_mesh(config.mesh)
    is_first = jax.process_index() == 0
    with (
        Watchdog(jax.process_count(), minimum_seconds=FLAGS.hang_seconds) as watchdog,
        run_dir.lock() if is_first else contextlib.nullcontext(),
        jax.set_mesh(mesh),
    ):
        status = _train(config, run_dir, window, mesh, watchdog)
    sys.exit(status)  # outside the block: all processes meet on their way out


def _train(config, run_dir, window: range, mesh, watchdog) -> int:
    """Trains to the end or to a stop, tracing the steps of `window`; returns the exit status."""
    from experiments import reporting
    from ttcd_jax.run import build
    from ttcd_jax.train.checkpoint import Checkpoints
    from ttcd_jax.train.compilation import compiled_once
    from ttcd_jax.train.loop import MetricCallback, StateCallback, train
    from ttcd_jax.train.profile import profiled

    place = build.placement(config, mesh)
    batches = _claim(config, run_dir, place.rows)
    stop = _StopSignal()
    checkpoints = Checkpoints(run_dir.checkpoints, model=config.model, keep=config.keep_checkpoints)

    def save(step, state):
        with watchdog.paused():
            checkpoints.save(step, state)

    try:
        start, state = _initial_state(config, checkpoints, mesh)
        if start >= config.steps:
            processes.say(f"{run_dir.path} is complete at step {start}: nothing to train")
            return 0
        processes.say(f"run directory {run_dir.path}")
        with (
            reporting.reporter(config, run_dir.path, start) as callbacks,
            compiled_once(build.build_step(config, mesh), start) as step,
            profiled(step, run_dir.path / "profile", start=start, window=window) as step,
        ):
            beat = MetricCallback(1, lambda step, _: watchdog.beat(step))
            _, done = train(
                state,
                step,
                batches,
                start=start,
                steps=config.steps,
                place=place,
                on_metrics=[*callbacks, beat],
                on_state=[StateCallback(config.checkpoint_every, save)],
                is_stopping=stop.is_set,
            )
    except (ValueError, RuntimeError) as error:
        watchdog.leave_if_lost(error)  # the writer would wait for the lost process
        raise
    finally:
        with watchdog.paused():
            checkpoints.close()
    if done < config.steps:
        processes.say(
            f"stopped by {stop.name} at step {done}, checkpoint saved; run the same command to go "
            f"on: {shlex.join(['python', '-m', 'experiments.launch', *sys.argv[1:]])}"
        )
        return RESUME_ME
    processes.say(f"trained {done} steps; checkpoints in {run_dir.checkpoints}")
    return 0


def _claim(config, run_dir, rows):
    """The batches, once the run directory is ours for this configuration and these data."""
    import jax
    from jax.experimental import multihost_utils

    from ttcd_jax.run import build
    from ttcd_jax.run.config import LAYOUT

    batches, manifest = build.build_data(config, rows)
    if jax.process_index() == 0:
        run_dir.claim(config.to_dict(), _source(), manifest, LAYOUT)
    multihost_utils.sync_global_devices("the run directory is claimed")
    return batches


def _initial_state(config, checkpoints, mesh):
    """(steps done, state): from the newest intact checkpoint if there is one, else from the run
    that the configuration names, else from the seed."""
    from jax.experimental import multihost_utils

    from ttcd_jax.run import build, start
    from ttcd_jax.train.state import TrainState

    if multihost_utils.broadcast_one_to_all(bool(checkpoints.steps())):
        done, restored = checkpoints.restore(build.abstract_state(config, mesh))
        processes.say(f"resumed at step {done}")
        return done, TrainState(**restored)
    if config.start_from is None:
        return 0, build.fresh_state(config, mesh)
    step, state = start.started_state(config, mesh)
    # From here on this directory alone decides: the other run may go on, or go away.
    checkpoints.save(0, dict(state))
    plan = start.plan_start(config)
    taken = f"{len(plan.taken)} parameters taken"
    processes.say(
        "\n  ".join([f"starts from step {step} of {config.start_from}: {taken}", *plan.lines()])
    )
    return 0, state


def _source() -> str:
    """The gin file and the parameters as given; what counts is `config.json`."""
    from experiments.gin_reading import find_gin_file

    text = find_gin_file(FLAGS.gin, cli.CONFIG_DIR).read_text(encoding="utf-8")
    return text + "".join(f"# --param {param}\n" for param in FLAGS.param)


class _StopSignal:
    """SIGTERM or SIGINT seen; a second one ends the process at once.

    Several processes agree on a step: JAX hears SIGTERM, of whichever process, and tells them all;
    a handler of ours would hide it.
    """

    def __init__(self) -> None:
        import jax

        self.name = ""
        self._is_alone = jax.process_count() == 1
        if self._is_alone:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._note)
        else:
            signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))

    def is_set(self, step: int) -> bool:
        """Whether to stop behind `step`, the same in all processes."""
        from jax.experimental import multihost_utils

        if not self._is_alone and multihost_utils.reached_preemption_sync_point(step):
            self.name = signal.SIGTERM.name
        return bool(self.name)

    def _note(self, number: int, frame) -> None:
        if self.name:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.name = signal.Signals(number).name


if __name__ == "__main__":
    cli.run(main)
