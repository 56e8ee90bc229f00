"""Trains a model: one .gin file in, one run directory out. The same command resumes an interrupted
run.

    python -m experiments.launch --gin=quickstart.gin [--param='RunConfig.steps=20' ...]
                                 [--run_dir=DIR] [--dry_run]

A stop by SIGTERM or Ctrl-C finishes the step, saves, and leaves with status 75: run the same
command to go on. A second Ctrl-C leaves at once.
"""

import signal
import sys
from pathlib import Path

from absl import flags

from experiments import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("gin", None, "A file in experiments/configs/, or a path.", required=True)
flags.DEFINE_multi_string("param", [], "A binding that overrides the file, as Class.field=value.")
flags.DEFINE_string("run_dir", None, "The run directory; default: runs/<name of the gin file>.")
flags.DEFINE_bool(
    "dry_run", False, "Print parameters, memory and FLOPs; allocate and write nothing."
)

CONFIG_DIR = Path(__file__).parent / "configs"
RESUME_ME = 75  # EX_TEMPFAIL


def main(argv: list[str]) -> None:
    from experiments import build, plan
    from experiments.gin_loading import load_config
    from experiments.run_config import RunConfig
    from ttcd_jax.train.run_directory import RunDirectory

    run_dir = RunDirectory(FLAGS.run_dir or Path("runs") / Path(FLAGS.gin).stem)
    config = load_config(
        RunConfig,
        FLAGS.gin,
        FLAGS.param,
        config_dir=CONFIG_DIR,
        inherit=build.inherited_model(run_dir),
    )
    build.check(config)
    if not run_dir.is_claimed:
        build.check_start(config)
    if FLAGS.dry_run:
        plan.print_plan(config)
        return
    with run_dir.lock():
        status = _train(config, run_dir)
    sys.exit(status)


def _train(config, run_dir) -> int:
    """Trains to the end or to a stop; returns the exit status."""
    from experiments import build, reporting
    from ttcd_jax.train.checkpoint import Checkpoints
    from ttcd_jax.train.loop import StateCallback, train

    batches, manifest = build.build_data(config)
    run_dir.claim(config.to_dict(), _source(), manifest)
    stop = _StopSignal()
    checkpoints = Checkpoints(run_dir.checkpoints, keep=config.keep_checkpoints)
    try:
        start, state = _initial_state(config, checkpoints)
        if start >= config.steps:
            print(f"{run_dir.path} is complete at step {start}: nothing to train")
            return 0
        print(f"run directory {run_dir.path}", flush=True)
        with reporting.Reporter(config, run_dir.path, start) as reporter:
            save = StateCallback(
                config.checkpoint_every,
                lambda step, state: checkpoints.save(step, state, {"steps": config.steps}),
            )
            _, done = train(
                state,
                build.build_step(config),
                batches,
                start=start,
                steps=config.steps,
                on_metrics=reporter.callbacks(),
                on_state=[save],
                is_stopping=lambda: stop.is_set,
            )
    finally:
        checkpoints.close()
    if done < config.steps:
        print(
            f"stopped by {stop.name} at step {done}, checkpoint saved; run the same command to "
            "go on",
            flush=True,
        )
        return RESUME_ME
    print(f"trained {done} steps; checkpoints in {run_dir.checkpoints}", flush=True)
    return 0


def _initial_state(config, checkpoints):
    """(steps done, state): from the newest intact checkpoint if there is one, else from the run
    that the configuration names, else from the seed."""
    from experiments import build
    from ttcd_jax.train.state import TrainState

    if checkpoints.steps():
        start, restored, _ = checkpoints.restore(build.abstract_state(config))
        print(f"resumed at step {start}", flush=True)
        return start, TrainState(**restored)
    if config.start_from is None:
        return 0, build.fresh_state(config)
    step, state = build.started_state(config)
    # From here on this directory alone decides: the other run may go on, or go away.
    checkpoints.save(0, dict(state), {"steps": config.steps})
    print(f"starts from step {step} of {config.start_from}", flush=True)
    return 0, state


def _source() -> str:
    """The gin file and the parameters as given; what counts is `config.json`."""
    from experiments.gin_reading import find_gin_file

    text = find_gin_file(FLAGS.gin, CONFIG_DIR).read_text(encoding="utf-8")
    return text + "".join(f"# --param {param}\n" for param in FLAGS.param)


class _StopSignal:
    """SIGTERM or SIGINT seen; a second one ends the process at once."""

    def __init__(self) -> None:
        self.is_set, self.name = False, ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame) -> None:
        if self.is_set:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.is_set, self.name = True, signal.Signals(number).name


if __name__ == "__main__":
    cli.run(main)
