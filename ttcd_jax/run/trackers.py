"""Trackers: objects that receive the records of a run as it trains, besides `metrics.jsonl` and
TensorBoard. `RunConfig.trackers` names them, and `train_run` takes any object of the protocol."""

import contextlib
import functools
import importlib.util
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from absl import logging

from ttcd_jax.errors import UserError
from ttcd_jax.files import write_whole
from ttcd_jax.registry import Registry

CLOSE_SECONDS = 10.0
_MOST_WAITING = 10_000  # calls


class Tracker(Protocol):
    """Receives records, in the first process only. A call that raises is a warning, and the tracker
    gets no more calls."""

    def start(self, run_dir: Path, config: dict[str, Any], step: int) -> None:
        """Called once, when `step` steps are done."""

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Receives one record of `step`: finite numbers, of a skipped step reason and rows too. Of
        a run that goes on after kills, no record comes twice that `metrics.jsonl` had before."""

    def close(self) -> None:
        """Called when the run ends, for whatever reason."""


class WeightsAndBiases:
    """A run of Weights & Biases in the folder `wandb` of the run directory, offline unless
    WANDB_MODE says otherwise; `wandb sync` uploads it. WANDB_PROJECT and WANDB_NAME default to the
    names of the directory's parent and its own. A run that goes on is the same run there, by the id
    in `wandb/id`."""

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
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=CLOSE_SECONDS,
            finish_timeout=CLOSE_SECONDS / 2,
            x_transaction_log_flush_interval=1.0,  # seconds that a kill loses
        )
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
register = TRACKERS.add  # (what makes the tracker, name in `RunConfig.trackers`)
register(WeightsAndBiases, "wandb")


def named(names: Iterable[str]) -> list[Tracker]:
    """The trackers of `RunConfig.trackers`. Raises `UserError` for a package that is missing."""
    return [TRACKERS.named(name)() for name in dict.fromkeys(names)]


class Background:
    """A tracker called in a thread of its own, so that one that raises, is slow or hangs costs the
    run nothing but one warning, and `CLOSE_SECONDS` at its end."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._name, self._is_over = tracker, type(tracker).__name__, False
        self._calls = queue.Queue[Callable[[], None]](_MOST_WAITING)
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._thread.start()

    def start(self, run_dir: Path, config: dict[str, Any], step: int) -> None:
        self._call(self._tracker.start, run_dir, config, step)

    def write(self, step: int, record: dict[str, Any]) -> None:
        self._call(self._tracker.write, step, record)

    def close(self) -> None:
        self._call(self._tracker.close)
        self._call(setattr, self, "_is_over", True)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"did not close within {CLOSE_SECONDS:.0f} s")

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._is_over:
            try:
                self._calls.put_nowait(functools.partial(function, *arguments))
            except queue.Full:
                self._warn(f"hangs, {_MOST_WAITING} calls behind")

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self._note)
            while not self._is_over:
                self._calls.get()()

    def _note(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._warn(f"failed ({type(error).__name__}: {' '.join(str(error).split())})")
        return True

    def _warn(self, problem: str) -> None:
        if not self._is_over:
            logging.warning("tracker %s %s: the run goes on without it", self._name, problem)
        self._is_over = True
