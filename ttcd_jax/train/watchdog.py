"""A watchdog, which ends a process soon after a peer is lost, with its own exit status: a
collective waits for a lost process forever, and so do JAX's exit handlers. A thread of JAX aborts
the process (SIGABRT) when any other one has not been heard of for some time."""

import collections
import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from math import inf
from typing import NoReturn, Self

from ttcd_jax.errors import UserError

PEER_LOST = 7

_MEDIAN_OF, _FACTOR = 32, 20.0  # steps; the limit of one in median steps
_EXIT_SECONDS = 10.0
# Messages of gloo, the coordination service and NCCL. A system error while NCCL connects is due to
# the machine's settings instead.
_LOST = re.compile(
    r"Gloo .* failed|coordination ?service|remote process exited"
    r"|NCCL operation (?!ncclCommInit).*unhandled system error",
    re.IGNORECASE,
)


class Watchdog:
    """Ends this process with `PEER_LOST`, without exit handlers, when an exception of a collective
    leaves the block, when JAX aborts it, or when no step has ended for 20 median steps and at least
    `minimum_seconds`, 10 times these in a save; then it prints the stacks of all threads.

        with Watchdog(jax.process_count()) as watchdog:
            ...
            watchdog.beat(step)

    The second beat arms it, since the first step compiles. Any other exception propagates: peers
    may have raised it too, and the exit handlers have up to 10 s to synchronise with them.
    """

    def __init__(self, num_processes: int, *, minimum_seconds: float = 60.0) -> None:
        self._has_peers, self.save_seconds = num_processes > 1, 10 * minimum_seconds
        self._minimum, self._limit = minimum_seconds, inf
        self._durations = collections.deque[float](maxlen=_MEDIAN_OF)
        self._step, self._begun, self._deadline = None, inf, inf
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        if self._has_peers:
            ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_over.set()
        if self._has_peers and isinstance(error, Exception):
            self.leave_if_lost(error)
            status = error.exit_code if isinstance(error, UserError) else 1
            # Before the others end as well, since then JAX would abort this one.
            seconds = min(_EXIT_SECONDS, self._minimum / 2)
            exit_timer = threading.Timer(seconds, os._exit, [status])
            exit_timer.daemon = True
            exit_timer.start()

    def leave_if_lost(self, error: Exception) -> None:
        if self._has_peers and is_peer_lost(error):
            leave(f"another process was lost ({error})")

    def beat(self, step: int) -> None:
        """Resets the time limit; to be called after every step."""
        if self._step is not None:
            self._durations.append(time.monotonic() - self._begun)
            self._limit = max(self._minimum, _FACTOR * statistics.median(self._durations))
        self._step = step
        self._begin(self._limit)

    @contextlib.contextmanager
    def paused(self, seconds: float = inf) -> Iterator[None]:
        """A context with its own limit after the first step, without one for an evaluation."""
        self._begin(inf if self._step is None else seconds)
        yield
        self._begin(self._limit)

    def _begin(self, seconds: float) -> None:
        self._begun = time.monotonic()
        self._deadline = self._begun + seconds

    def _watch(self) -> None:
        while not self._is_over.wait(min(1.0, self._minimum / 10)):
            if (now := time.monotonic()) > self._deadline:
                faulthandler.dump_traceback()
                leave(
                    f"no step for {now - self._begun:.0f} s after step {self._step}: another "
                    "process is lost or hangs"
                )


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    """Leaves if a thread of JAX aborts. Python's `signal` would wait for the main thread."""
    if threading.get_native_id() not in {thread.native_id for thread in threading.enumerate()}:
        leave("another process was lost, as the lines above say")
    faulthandler.dump_traceback()


def is_peer_lost(error: BaseException | None) -> bool:
    """Whether `error` or its cause comes from a collective or barrier that lost a peer."""
    while error is not None:
        if _LOST.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave(reason: str) -> NoReturn:
    """Ends the process with `PEER_LOST` and one line, without exit handlers."""
    line = " ".join(reason.split())
    time.sleep(0.5)  # the lines of JAX's threads about it come first
    print(f"error: {line}; restart the job, it goes on from its last checkpoint", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(PEER_LOST)
