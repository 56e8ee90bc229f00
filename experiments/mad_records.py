"""One JSON file per finished setting and method, whole or not there."""

import json
import os
from pathlib import Path
from typing import Any

from experiments.mad_config import Job
from ttcd_jax.errors import UserError


class Records:
    """The files of a folder, by the name of their job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, job: Job) -> bool:
        return self._path(job).exists()

    def write(self, job: Job, record: dict[str, Any]) -> None:
        """On disk, under its own name, when this returns."""
        self._folder.mkdir(exist_ok=True)
        path = self._path(job)
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

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
