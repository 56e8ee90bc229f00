"""Training or resuming a run in one call, from its configuration to the files of its directory."""

import contextlib
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from ttcd_jax import storage
from ttcd_jax.allocation import return_freed_memory
from ttcd_jax.data.corpus import library
from ttcd_jax.data.pipeline import MakeBatches, StepBatches
from ttcd_jax.errors import CheckpointError, NonFiniteError, UserError
from ttcd_jax.files import sha256
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig, common_fields
from ttcd_jax.run.directory import METRICS, RunDirectory
from ttcd_jax.run.evaluation import best_scores, evaluation_callbacks
from ttcd_jax.run.reporting import batch_rows, read_metrics, reporter
from ttcd_jax.run.start import plan_start, started_state
from ttcd_jax.run.trackers import TRACKERS, Tracker
from ttcd_jax.sharding.distributed import agree
from ttcd_jax.terminal import phase, say, say_started
from ttcd_jax.train.checkpoint import Checkpoints, Kept, check_directory
from ttcd_jax.train.loop import HostMetrics, MetricCallback, StateCallback, train
from ttcd_jax.train.metrics import measured
from ttcd_jax.train.profile import profiled
from ttcd_jax.train.state import TrainState
from ttcd_jax.train.step import TrainStep
from ttcd_jax.train.watchdog import Watchdog

_SAVE = "ttcd_jax/save/"


class TrainedRun(NamedTuple):
    """Steps done, and the signal that stopped the run before its last step."""

    step: int
    stopped_by: str | None = None


def train_run(
    config: RunConfig,
    run_dir: str | os.PathLike[str],
    batches: MakeBatches | None = None,
    *,
    on_metrics: Sequence[MetricCallback] = (),
    trackers: Sequence[Tracker] = (),
    source: str | None = None,
    changes: Sequence[str] = (),
    profile: range = range(0),
    hang_seconds: float = 60.0,
) -> TrainedRun:
    """Trains a run to its last step; a run directory that has checkpoints is resumed.

    `batches`, for a run whose data are `BatchesConfig`, makes the batches from a given step on.
    `trackers` receive the metrics, as those that the configuration names.
    `source`, the text of the configuration, is stored. `changes` names fields (`RunConfig.steps`)
    in which a resumed run may change. The steps of `profile` are traced. SIGTERM, SIGHUP and Ctrl-C
    finish the step, save and return; a second Ctrl-C ends the process; SIGUSR1 saves after the
    step; SIGUSR2 traces three steps. To be called in the main thread of every process of the job,
    alike in all; one is lost when a step takes longer than `hang_seconds` and 20 times the median
    step, or a save 10 times `hang_seconds`.

    Raises `UserError` for a configuration or directory that cannot be trained, and its subclasses
    for data, checkpoints and a loss that is not finite.
    """
    if not isinstance(config, RunConfig):
        raise UserError(f"a run's configuration is a RunConfig, not {config!r:.60}")
    directory = RunDirectory(run_dir)
    trackers = [*(TRACKERS.named(name)() for name in config.trackers), *trackers]
    options = {"run_dir": storage.shown(directory.path), "changes": [*changes]}
    options |= {"profile": str(profile), "hang_seconds": hang_seconds}
    options |= common_fields(config.to_dict())
    with Watchdog(jax.process_count(), minimum_seconds=hang_seconds) as watchdog:
        agree("configuration", options, watchdog.save_seconds)
        check(config, directory)
        program = build.Program(config)
        program.check_bytes()
        is_first = jax.process_index() == 0
        with directory.lock() if is_first else contextlib.nullcontext(), jax.set_mesh(program.mesh):
            with phase("reading data"):
                data, manifest = build.build_data(config, program.placement.rows, batches)
            agree("data", common_fields(manifest), watchdog.save_seconds)
            if is_first:
                check_kept(directory)
                directory.claim(config.to_dict(), source, manifest, changes=changes)
            agree("claim", {}, watchdog.save_seconds)
            directory.fetch()
            seen = {x.name: sha256(x) for x in directory.path.glob("*.json")}
            agree("run directory", seen, watchdog.save_seconds)
            for part in manifest.get("parts", [manifest]):
                if line := library(part):
                    say(line)
            calls = on_metrics, trackers
            return _train(config, directory, program, watchdog, data, *calls, profile)


def check(config: RunConfig, directory: RunDirectory | None) -> None:
    """Raises `UserError` for a model that does not fit its data or `start_from`, and for a folder
    that cannot hold checkpoints; None: none was named."""
    build.check(config)
    if directory is not None:
        check_directory(directory.checkpoints)
        directory.check_free()
    if config.start_from is not None and not (directory and directory.is_claimed):
        plan_start(config)


def check_kept(directory: RunDirectory) -> None:
    """Raises `CheckpointError` for a run whose checkpoints have vanished. The folder is made before
    the first report, on a disk, and the first checkpoint is complete when the second one is handed
    over."""
    folder, path = directory.checkpoints, directory.path / METRICS
    if directory.is_claimed and not any(folder.glob("[0-9]*")):
        every = directory.read_config().get("checkpoint_every", 0)  # before it changes
        done = max((record["step"] for record in read_metrics(path)), default=0)
        if done > (2 * every if folder.is_dir() or storage.address(folder) else 0):
            raise CheckpointError(
                f"{path} reports {done} steps and {folder} holds no checkpoint: restore a copy, or "
                "start anew in another run directory"
            )


def _train(
    config: RunConfig,
    directory: RunDirectory,
    program: build.Program,
    watchdog: Watchdog,
    batches: StepBatches,
    on_metrics: Sequence[MetricCallback],
    trackers: Sequence[Tracker],
    profile: range,
) -> TrainedRun:
    """`train_run` in the claimed directory, on the mesh of `program`."""
    scores = best_scores(config, read_metrics(directory.path / METRICS))
    with (
        _Signals(config.checkpoint_minutes) as signals,
        _checkpoints(config, directory, watchdog, scores) as checkpoints,
    ):
        start, state = _resumed(program, checkpoints)
        is_missed = bool(multihost_utils.broadcast_one_to_all(_is_missed(config, directory, start)))
        if start >= config.steps and not is_missed:
            say(f"{directory.path} is complete at step {start}: nothing to train")
            return TrainedRun(start)
        say(f"run directory {directory.path}: compiling its step")
        beat = MetricCallback(1, lambda step, _: watchdog.beat(step))
        rows_at_once = config.batch_size // (program.config.accumulation_steps or 1)
        on_bad = functools.partial(_stop_after_too_many, config, checkpoints)

        @watchdog.paused(watchdog.save_seconds)
        def save(step: int, state: TrainState) -> None:
            checkpoints.save(step, dict(state))
            signals.note_save()

        def evaluated(step: int, metrics: dict[str, float]) -> None:
            write(step, metrics)
            scores.update(best_scores(config, [{"step": step, **metrics}]))

        step, state = _compiled(program, checkpoints, start, state)
        with (
            reporter(config, directory.path, start, trackers, watchdog) as (callbacks, write),
            profiled(step, directory.path / "profile", start=start, window=profile) as step,
        ):
            saves = StateCallback(config.checkpoint_every, save, _saves(config, signals))
            others = evaluation_callbacks(config, directory, evaluated, rows_at_once)
            on_state = [x._replace(call=watchdog.paused()(x.call)) for x in (saves, *others)]
            for callback in on_state[1:] if is_missed else ():
                callback.call(start, state)
            _, done = train(
                state,
                step,
                batches,
                start=start,
                steps=config.steps,
                placement=program.placed,
                on_metrics=[*callbacks, *on_metrics, beat],
                on_state=on_state,
                is_stopping=signals.is_stopping,
                on_bad=watchdog.paused(watchdog.save_seconds)(on_bad),
            )
    if done == config.steps:
        say(f"trained {done} steps; checkpoints in {directory.checkpoints}")
    return TrainedRun(done, signals.name if done < config.steps else None)


def _is_missed(config: RunConfig, directory: RunDirectory, step: int) -> bool:
    """Whether the evaluation after a saved step was due and interrupted."""
    every, names = config.evaluate_every, {f"{task.name}/" for task in config.evaluations}
    if every is None or not 0 < step <= config.steps or (step % every and step != config.steps):
        return False
    records = (x for x in read_metrics(directory.path / METRICS) if x["step"] == step)
    return not any(key.startswith(tuple(names)) for record in records for key in record)


def _stop_after_too_many(
    config: RunConfig, checkpoints: Checkpoints, step: int, reason: str, metrics: HostMetrics
) -> None:
    """Raises `NonFiniteError` for a bad step that is not skipped, or not any more."""
    most, skipped = config.max_skipped_steps, int(metrics.get("skipped_steps", 1))
    if metrics.get("is_skipped", False) and skipped <= most:
        return
    checkpoints.wait()
    saved, (first, last) = checkpoints.steps(), batch_rows(config, step)
    good, memory = f"step {saved[-1]}" if saved else "none", config.model.settings
    is_written = memory is not None and memory.to_dict().get("eta")
    eta = f" or {type(memory).__name__}.eta" if is_written else ""
    raise NonFiniteError(
        f"{reason} at step {step}, in rows {first} .. {last} of the data; bad steps: {skipped}, "
        f"RunConfig.max_skipped_steps: {most}; last good checkpoint: {good}. Resume with "
        f"--param=RunConfig.max_skipped_steps={skipped + 9} to skip such steps, or start anew with "
        f"a lower ScheduleConfig.peak{eta}"
    )


@contextlib.contextmanager
def _checkpoints(
    config: RunConfig, directory: RunDirectory, watchdog: Watchdog, scores: dict[int, float]
) -> Iterator[Checkpoints]:
    """The checkpoints of the run, closed on exit unless a process was lost."""
    kept = Kept(config.keep_checkpoints, config.keep_every, config.keep_best, scores)
    checkpoints = Checkpoints(directory.checkpoints, model=config.model, kept=kept)
    try:
        yield checkpoints
    except (ValueError, RuntimeError) as error:
        watchdog.leave_if_lost(error)  # the writer would wait for the lost process
        raise
    finally:
        with watchdog.paused(watchdog.save_seconds):
            checkpoints.close()
        error, steps = sys.exception(), checkpoints.steps()
        is_told = isinstance(error, CheckpointError) or "last good" in str(error)
        if error is not None and steps and not is_told:
            error.add_note(f"last good checkpoint: step {steps[-1]}; the same command goes on")


def _resumed(program: build.Program, checkpoints: Checkpoints) -> tuple[int, TrainState | None]:
    """(steps done, state) from the newest intact checkpoint; (0, None) without one."""
    if not multihost_utils.broadcast_one_to_all(bool(checkpoints.steps())):
        return 0, None
    with phase("reading the checkpoint"):
        # Whether bad steps are counted may change when a run is resumed.
        done, state = checkpoints.restore({**program.state, "skips": program.skips})
    say(f"resumed at step {done}")
    return done, program.resumed(state)


def _compiled(
    program: build.Program, checkpoints: Checkpoints, start: int, state: TrainState | None
) -> tuple[TrainStep, TrainState]:
    """(the compiled step, `state` after step `start`); without a state the first is drawn
    meanwhile. The step has the metrics that are separate programs, where the run logs."""
    with phase("tracing"):
        lowered = program.step()
    with ThreadPoolExecutor(1, "compile") as thread:
        compiled = thread.submit(lowered.compile)
        state = state or _first_state(program, checkpoints)
        with phase("compiling"):
            step = compiled.result()
    with phase("compiling the metrics"):
        measures = [measure.compile() for measure in program.measures()]
    return_freed_memory()
    say_started()
    every, last = program.config.log_every, program.config.steps
    return measured(step, measures, start=start, every=every, last=last), state


def _first_state(program: build.Program, checkpoints: Checkpoints) -> TrainState:
    """The state before the first step, from `start_from`, else from the seed."""
    with phase("drawing parameters"):
        if program.config.start_from is None:
            return program.fresh_state()
        step, plan, state = started_state(program)
        # So that resuming needs this directory alone, even if the other run is deleted.
        checkpoints.save(0, dict(state))
    taken = f"{len(plan.taken)} parameters taken"
    say(f"starts from step {step} of {program.config.start_from}: {taken}")
    for line in plan.lines():
        say(f"  {line}")
    return state


class _Signals(contextlib.ExitStack):
    """Records SIGTERM, SIGINT or SIGHUP, which stop the run; a second one ends the process at once,
    except SIGHUP: a closed terminal sends it twice, and under `nohup` it stays ignored. With
    several processes JAX handles SIGTERM, so all stop after the same step.

    SIGUSR1 to any process asks for a checkpoint, and so does process 0 when the last one is
    `minutes` old. A process enters a step when all have ended the step before the last, so that no
    process is two steps ahead of another, and a message sent two steps ahead reaches all in time.

    The previous handlers are restored on exit.
    """

    def __init__(self, minutes: float | None) -> None:
        super().__init__()
        self.name, self._is_asked, self._last_save = "", False, time.monotonic()
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._is_alone = jax.process_count() == 1

    def __enter__(self) -> Self:
        numbers = [signal.SIGINT, signal.SIGUSR1, *([signal.SIGTERM] if self._is_alone else [])]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def is_stopping(self, step: int) -> bool:
        """Whether to stop after `step`, the same in all processes."""
        if not self._is_alone and multihost_utils.reached_preemption_sync_point(step):
            self.name = signal.SIGTERM.name
        return bool(self.name)

    def is_saving(self, step: int) -> bool:
        """Whether to save after `step`, the same in all processes."""
        is_late = time.monotonic() - self._last_save >= self._seconds and jax.process_index() == 0
        if is_asked := self._is_asked or is_late:
            self.note_save()
        if self._is_alone:
            return is_asked
        client = ocp.multihost.get_jax_distributed_client()
        if is_asked:
            client.key_value_set(f"{_SAVE}{step + 2}", "", allow_overwrite=True)
        return any(key == f"{_SAVE}{step}" for key, _ in client.key_value_dir_get(_SAVE))

    def note_save(self) -> None:
        """Notes that a checkpoint is saved now."""
        self._is_asked, self._last_save = False, time.monotonic()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._is_asked = True
        elif not self._is_alone:
            signal.raise_signal(signal.SIGTERM)
        elif self.name and number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        else:
            self.name = self.name or signal.Signals(number).name


def _saves(config: RunConfig, signals: _Signals) -> Callable[[int], bool]:
    """Whether a step is saved besides every `checkpoint_every`-th; all processes ask at each."""
    every = config.evaluate_every if config.keep_best is not None else None
    return lambda step: signals.is_saving(step) or (every is not None and step % every == 0)
