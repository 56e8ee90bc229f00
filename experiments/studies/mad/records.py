"""One JSON file per finished setting and method, complete or absent."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.studies.mad.config import Job
from ttcd_jax.config import differences
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.files import lock, read_json, write_whole
from ttcd_jax.measure.results import damage_named

Record = dict[str, Any]
type Known = dict[tuple[str, ...], tuple[Path, dict[str, Any]]]  # by task and part of its settings


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
    or trained a task by other settings, and where a file is damaged."""
    records: dict[str, Record] = {}
    known: Known = {}
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
            with damage_named(str(path)):
                _check_alike(known, path, records[path.name])
    return list(records.values())


def _check_alike(known: Known, path: Path, record: Record) -> None:
    """Raises `UserError` where the scores of a task would be of other settings than its `known`
    ones: a method's of another model, a setting's of other rows."""
    names, model = ("rate", "weight_decay", "seed"), record["model"]
    shared = {name: model[name] for name in ("init_std", "precision")}
    shared |= {name: record[name] for name in ("recipe", "num_test")}
    shared["runs"] = [[run[name] for name in names] for run in record["runs"]]
    of_setting = {name: record[name] for name in ("data", "num_train", "epochs", "steps")}
    of_method = {"model": model | {"vocab_size": None}}
    parts = {"": shared, record["setting"]: of_setting, record["method"]: of_method}
    for part, facts in parts.items():
        first, expected = known.setdefault((record["task"], part), (path, facts))
        if changed := differences(expected, facts):
            text = f"{path} is of other settings than {first} ({changed[0]})"
            raise UserError(f"{text}: show one of their sweeps alone")
