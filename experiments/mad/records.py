"""One JSON file per finished setting and method, complete or absent."""

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
    def claim(self, job: Job) -> Iterator[bool]:
        """Whether this process does the job: it is not recorded, and no other process of this
        machine has claimed it. The claim ends with the block, or with the process."""
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
        """Whole and on disk when this returns."""
        text = json.dumps(record, indent=1, allow_nan=False)
        write_whole(self._path(job), text + "\n", is_durable=True)

    def read(self) -> Iterator[dict[str, Any]]:
        """All records. Raises `UserError` naming a file that is damaged."""
        if not self._folder.is_dir():
            raise UserError(f"{self._folder.parent} holds no records: give the folder of a sweep")
        for path in sorted(self._folder.glob("*.json")):
            try:
                yield json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                mistake = f"{path} is damaged ({error}): delete it and run the sweep again"
                raise UserError(mistake) from error

    def _path(self, job: Job) -> Path:
        return self._folder / f"{job.name}.json"


def gather(sweeps: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of several sweeps. Raises `UserError` where one has none, or two have the same
    job."""
    records: dict[tuple[str, str, str], dict[str, Any]] = {}
    for sweep in sweeps:
        for record in Records(sweep / "records").read():
            job = record["task"], record["setting"], record["method"]
            if job in records:
                raise UserError(
                    f"{sweep} has {'.'.join(job)}, and so has another of the sweeps: show one of "
                    "them without --beside"
                )
            records[job] = record
    return list(records.values())
