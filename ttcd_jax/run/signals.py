"""Signals to a run: those that stop it, and the one that saves a checkpoint."""

import math
import signal
import time
from types import FrameType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

_KEY = "ttcd_jax/save/"
_AHEAD = 2  # steps


class SaveRequests:
    """Requests for a checkpoint: a SIGUSR1 to any process, and the time `minutes` after the last
    checkpoint on the clock of process 0.

    A process enters a step when the step before the last has ended, which all have taken part in.
    So no process is a whole step ahead of another, and what one of them announces for the step
    after next reaches all in time.
    """

    def __init__(self, minutes: float | None) -> None:
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._is_requested, self._last, self._before = False, time.monotonic(), None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`, the same in all processes."""
        is_late = time.monotonic() - self._last >= self._seconds and jax.process_index() == 0
        is_requested = self._is_requested or is_late
        if is_requested:
            self.satisfied()
        if jax.process_count() == 1:
            return is_requested
        client = ocp.multihost.get_jax_distributed_client()
        if is_requested:
            client.key_value_set(f"{_KEY}{step + _AHEAD}", "", allow_overwrite=True)
        return any(key == f"{_KEY}{step}" for key, _ in client.key_value_dir_get(_KEY))

    def satisfied(self) -> None:
        """Notes that a checkpoint is saved now."""
        self._is_requested, self._last = False, time.monotonic()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True


class StopSignal:
    """Records SIGTERM, SIGINT or SIGHUP; a second one ends the process at once, except SIGHUP,
    which a closed terminal sends twice and which stays ignored under `nohup`. The previous handlers
    are restored on exit. With several processes JAX handles SIGTERM, so all stop after the same
    step.
    """

    def __init__(self) -> None:
        self.name = ""
        self._is_alone = jax.process_count() == 1
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = [signal.SIGINT, *([signal.SIGTERM] if self._is_alone else [])]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, call in self._before.items():
            signal.signal(number, call)

    def is_set(self, step: int) -> bool:
        """Whether to stop after `step`, the same in all processes."""
        if not self._is_alone and multihost_utils.reached_preemption_sync_point(step):
            self.name = signal.SIGTERM.name
        return bool(self.name)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._is_alone:
            signal.raise_signal(signal.SIGTERM)
            return
        if self.name and number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.name = self.name or signal.Signals(number).name
