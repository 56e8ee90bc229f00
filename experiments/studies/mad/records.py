"""One JSON file per finished setting and method, complete or absent."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.studies.mad.config import Job
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import lock, read_json, write_whole

Record = dict[str, Any]


def record_path(sweep: Path, job: Job) -> Path:
    return sweep / "records" / f"{job.name}.json"


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether this process does the job of record `path`: it is not recorded yet, and no other
    process of this machine has claimed it. The claim ends with the block, or with the process."""
    locks = path.parent / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / path.stem).open("w") as handle:
        try:
            lock(handle)
        except BlockingIOError:
            yield False
            return
        yield not path.exists()


def write(path: Path, record: Record) -> None:
    """Writes the record atomically; it is on disk when this returns."""
    write_whole(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def gather(sweeps: Sequence[Path]) -> list[Record]:
    """The records of several sweeps. Raises `UserError` where one has none, two have the same job,
    or a file is damaged."""
    records: dict[str, Record] = {}
    for sweep in sweeps:
        if not (sweep / "records").is_dir():
            raise UserError(f"{sweep} holds no records: give the folder of a sweep")
        for path in sorted((sweep / "records").glob("*.json")):
            if path.name in records:
                raise UserError(
                    f"{sweep} has {path.stem}, and so has another of the sweeps: show one of them "
                    "without --beside"
                )
            try:
                records[path.name] = read_json(path)
            except DataError as error:
                raise DataError(f"{error}: delete the file and run the sweep again") from error
    return list(records.values())
