"""One JSON file per finished setting and method, whole or not there."""

import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.mad.config import Job
from ttcd_jax.errors import UserError
from ttcd_jax.files import write_whole


class Records:
    """The files of a folder, by the name of their job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, job: Job) -> bool:
        return self._path(job).exists()

    @contextlib.contextmanager
    def taking(self, job: Job) -> Iterator[bool]:
        """Whether the job is this process's to do: not recorded, and no other process of this
        machine is at it. Holds it until the end; a process that dies lets go of it."""
        locks = self._folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / job.name).open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield not self.has(job)

    def write(self, job: Job, record: dict[str, Any]) -> None:
        """On disk, under its own name, when this returns."""
        text = json.dumps(record, indent=1, allow_nan=False)
        write_whole(self._path(job), text + "\n", is_durable=True)

    def read(self) -> list[dict[str, Any]]:
        """All records. Raises `UserError` naming a file that is damaged."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(json.loads(path.read_text(encoding="utf-8")))
            except ValueError as error:
                raise UserError(
                    f"{path} is damaged ({error}): delete it and run the sweep again"
                ) from error
        return found

    def _path(self, job: Job) -> Path:
        return self._folder / f"{job.name}.json"


def check_beside(sweeps: Sequence[Path]) -> None:
    """Raises `UserError` naming a directory that holds no records."""
    for sweep in sweeps:
        if not (sweep / "records").is_dir():
            raise UserError(f"--beside={sweep} holds no records: give the directory of a sweep")


def gather(own: Path, beside: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of several sweeps. Raises `UserError` where two have the same job."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for sweep in (own, *beside):
        for record in Records(sweep / "records").read():
            job = record["task"], record["setting"], record["method"]
            if job in found:
                raise UserError(
                    f"{sweep} has {'.'.join(job)}, and so has another of the sweeps: show one of "
                    "them without --beside"
                )
            found[job] = record
    return list(found.values())
