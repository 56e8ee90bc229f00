"""Files compared with their digests, each before its first use.

A file that was found intact leaves a marker in the user's cache folder, named after the digest and
the file's size, inode and times, and is not read again at a restart. Every write sets the time of
the status change (ctime), which no user can set back. The marker is locked while the file is read:
other processes of the host wait for the result.
"""

import contextlib
import fcntl
import hashlib
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ttcd_jax.files import difference, lock, user_cache

_THREADS = 4
_SETTLED = 2  # seconds: of two writes within a tick of the file system's clock one leaves no trace


class VerifiedFiles:
    """Files of (path, size, sha256), compared by threads; one that is needed before its turn is
    compared by its reader. The last one belongs to all others."""

    def __init__(self, files: Sequence[tuple[Path, int, str]]) -> None:
        self._files = files
        self._locks = [threading.Lock() for _ in files]
        self._done: set[int] = set()
        self._problem: str | None = None
        # In an order of its own: two processes seldom wait for one file.
        waiting = random.Random(os.getpid()).sample(range(len(files)), len(files))
        for _ in range(min(_THREADS, len(files))):
            threading.Thread(target=self._work, args=(waiting,), daemon=True).start()

    def _work(self, waiting: list[int]) -> None:
        with contextlib.suppress(IndexError):  # all are taken
            while True:
                self._verify(waiting.pop())

    def _verify(self, number: int) -> None:
        with self._locks[number]:
            if number not in self._done:
                path, num_bytes, digest = self._files[number]
                if problem := _difference(path, num_bytes, digest):
                    self._problem = f"{path}: {problem}"
                self._done.add(number)

    def problem(self, number: int) -> str | None:
        """How a file differs, once this one is compared, or how it was cut since: reading a mapped
        file that was cut would kill the process."""
        for needed in {number, len(self._files) - 1} - self._done:
            self._verify(needed)
        path, num_bytes, _ = self._files[number]
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            size = num_bytes  # unlinked: the mapping has its content
        cut = f"{path} was cut to {size} of {num_bytes} bytes" if size < num_bytes else None
        return self._problem or cut


def _difference(path: Path, num_bytes: int, digest: str) -> str | None:
    """`difference`, without reading a file that has a marker."""
    with contextlib.suppress(OSError):  # the file is not there, or the cache cannot be written
        marker = _marker(path, num_bytes, digest)
        if time.time() - path.stat().st_ctime >= _SETTLED:
            marker.parent.mkdir(parents=True, exist_ok=True)
            with marker.open("ab") as file:
                lock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_size:
                    return None
                problem = difference(path, num_bytes, digest)
                if problem is None and _marker(path, num_bytes, digest) == marker:
                    file.write(b"intact")
                return problem
    return difference(path, num_bytes, digest)


def _marker(path: Path, num_bytes: int, digest: str) -> Path:
    s = path.stat()
    state = (digest, num_bytes, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns)
    return user_cache() / "verified" / hashlib.sha256(repr(state).encode()).hexdigest()
