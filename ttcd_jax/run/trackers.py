"""Trackers: objects that receive the records of a run as it trains, besides `metrics.jsonl` and
TensorBoard. `RunConfig.trackers` names them, and `train_run` takes any object of the protocol."""

import contextlib
import importlib.util
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from absl import logging

from ttcd_jax.errors import UserError
from ttcd_jax.files import write_whole
from ttcd_jax.registry import Registry


class Tracker(Protocol):
    """Receives records, in the first process only. A call that raises is a warning, and the tracker
    gets no more calls; the run waits for a slow one."""

    def start(self, run_dir: Path, config: dict[str, Any], step: int) -> None:
        """Called once, when `step` steps are done."""

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Receives one record of `step`: finite numbers, of a skipped step reason and rows too. A
        run that goes on after kills repeats no record that `metrics.jsonl` had before."""

    def close(self) -> None:
        """Called when the run ends, for whatever reason."""


class WeightsAndBiases:
    """A run of Weights & Biases in the folder `wandb` of the run directory, offline unless
    WANDB_MODE says otherwise; `wandb sync` uploads it. WANDB_PROJECT and WANDB_NAME default to the
    names of the directory's parent and its own. A run that goes on keeps its `wandb/id`."""

    def __init__(self) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                "RunConfig.trackers has 'wandb', a package that is not installed: pip install "
                "'ttcd-jax[wandb]'"
            )

    def start(self, run_dir: Path, config: dict[str, Any], step: int) -> None:
        import wandb  # half a second

        stored = run_dir / "wandb" / "id"
        if not stored.exists():
            write_whole(stored, uuid.uuid4().hex)
        seconds: dict[str, Any] = {"init_timeout": 10.0, "finish_timeout": 5.0}
        seconds["x_transaction_log_flush_interval"] = 1.0  # that a kill loses
        settings = wandb.Settings(silent=True, console="off", **seconds)
        wandb.setup(settings)  # silent from here on: no prompt for a key either
        self._run = wandb.init(
            id=stored.read_text(encoding="utf-8"),
            resume="allow",
            dir=run_dir,
            config=config,
            project=os.environ.get("WANDB_PROJECT", run_dir.parent.name),
            name=os.environ.get("WANDB_NAME", run_dir.name),
            mode=os.environ.get("WANDB_MODE", "offline"),  # pyright: ignore[reportArgumentType]
            settings=settings,
        )

    def write(self, step: int, record: dict[str, Any]) -> None:
        self._run.log(record, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS = Registry[Callable[[], Tracker]]("tracker")
register = TRACKERS.add  # (class or function of the tracker, name in `RunConfig.trackers`)
register(WeightsAndBiases, "wandb")


class Guarded(contextlib.AbstractContextManager):
    """A tracker that gets no more calls after the first one that raises, which is a warning."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._has_failed = tracker, False

    def call(self, method: Literal["start", "write", "close"], *arguments: Any) -> None:
        """Calls a method of the tracker, in this thread: the run waits for it."""
        if not self._has_failed:
            with self:
                getattr(self._tracker, method)(*arguments)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._has_failed = isinstance(error, Exception | SystemExit)
        if self._has_failed:
            problem = f"failed ({type(error).__name__}: {' '.join(str(error).split())})"
            name = type(self._tracker).__name__
            logging.warning("tracker %s %s: the run goes on without it", name, problem)
        return self._has_failed
