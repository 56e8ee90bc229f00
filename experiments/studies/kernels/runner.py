"""A job in a process of its own, with a limit and a row in a file of JSON: the same command goes on
from the file, tries again what crashed or hung, and everything after a change of surroundings.

    {"environment": {device, commit}, "surroundings": {DIGEST: {device, versions, ...}},
     "rows": [{*JOB, DIGEST, ...}]}
"""

import concurrent.futures
import hashlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ttcd_kernels import launch, measure, verified
from ttcd_kernels.measure import Row
from ttcd_kernels.table import write_json

from experiments.studies.kernels.programs import FAILED

PROGRAM = ("-m", "experiments.studies.kernels")
_LOST = f"{FAILED}no result "
_WARM_UP = "import triton, jax; jax.block_until_ready(jax.numpy.ones(8) @ jax.numpy.ones(8))"
_LEAST = 15  # seconds in which no process gives a result
_VARIABLES = ("CUDA_", "JAX_", "NVIDIA_", "TRITON_", "XLA_")


class Job(NamedTuple):
    """The task of one process, in texts."""

    step: str
    op: str
    case: str
    dtype: str = ""
    implementation: str = ""  # or a kernel
    tile: str = ""  # its numbers, with commas


def surroundings() -> dict[str, Any]:
    """What a result depends on apart from its job: device, versions, sources, variables."""
    found = measure.environment() | {"source": verified.source()}
    found["study"] = verified.source(Path(__file__).parent)
    for name in ("triton", "jax-triton", "jax-cuda13-plugin"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    variables = {x: value for x, value in os.environ.items() if x.startswith(_VARIABLES)}
    return found | variables | {"clocks": None, "commit": None}


class Store(dict[Job, Row]):
    """The rows of these surroundings by job, those of others only kept in the file; without a file
    they are in this process alone. `tables`: what else the file has, from these rows."""

    tables: Callable[[list[Row]], Row] = staticmethod(lambda rows: {})

    def __init__(self, parser: ArgumentParser, file: Path | None, minutes: float) -> None:
        """No process is started after so many minutes. Ends the command if the file is damaged."""
        super().__init__()
        self._file, self._until, self._is_warm = file, time.monotonic() + 60 * minutes, False
        here, environment = surroundings(), measure.environment()
        print(" ".join(f"{key}={value}" for key, value in environment.items()), flush=True)
        self._digest = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:12]
        self._seen, self._others = {self._digest: here | environment}, []
        if file is None or not file.exists():
            return
        try:
            earlier = json.loads(file.read_text())
            self._seen = earlier["surroundings"] | self._seen
            for row in earlier["rows"]:
                is_ours = row["surroundings"] == self._digest
                self.update({job_of(row): row}) if is_ours else self._others.append(row)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            text = f"{file} is no report of this command ({error!r})"
            parser.error(f"--output: {text}; name another file")

    def left(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs without a row, at the end those that were lost."""
        lost = [x for x in jobs if self.get(x, {}).get("note", "").startswith(_LOST)]
        return [*(x for x in jobs if x not in self), *lost]

    def run(
        self, jobs: Sequence[Job], seconds: float, at_once: Callable[[Job], int]
    ) -> Iterator[Row]:
        """The row of every job that is `left`, as it ends, added here and to the file: `at_once` of
        its kind, and no more than there are cores."""
        cores, left = os.cpu_count() or 1, self.left(jobs)
        if cores > 1 and left and not self._is_warm and launch.capability() is not None:
            # One process reads from a cold disk the libraries that all of them want.
            subprocess.run([sys.executable, "-c", _WARM_UP], capture_output=True, check=False)
            self._is_warm = True
        for size, part in itertools.groupby(left, at_once):
            pool = concurrent.futures.ThreadPoolExecutor(min(cores, size))
            try:
                futures = [pool.submit(self._row, job, seconds) for job in part]
                for future in concurrent.futures.as_completed(futures):
                    if (row := future.result()) is not None:
                        self[job_of(row)] = row | {"surroundings": self._digest}
                        self.write()
                        yield row
            finally:
                pool.shutdown(cancel_futures=True)

    def write(self) -> None:
        """The file, with the devices and commits of all rows."""
        all_of = {
            name: ", ".join(dict.fromkeys(str(facts.get(name)) for facts in self._seen.values()))
            for name in ("device", "commit")
        }
        head = {"environment": all_of, "surroundings": self._seen} | self.tables([*self.values()])
        write_json(head | {"rows": [*self._others, *self.values()]}, self._file)

    def _row(self, job: Job, seconds: float) -> Row | None:
        left = self._until - time.monotonic()
        return None if left < _LEAST else in_process(job, min(seconds, left))


def job_of(row: Row) -> Job:
    return Job(*(row[name] for name in Job._fields))


def in_process(job: Job, seconds: float, program: Sequence[str] = PROGRAM) -> Row:
    """The row that `python PROGRAM --job FIELD ...` prints last; one with a note if it crashes, or
    gives no result in so many seconds."""
    command = [sys.executable, *program, "--job", *job]
    env = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # the last line is the error's
    env |= {"OPENBLAS_NUM_THREADS": "1"}  # the definition's, in as many processes as cores
    options: Any = {"capture_output": True, "text": True, "check": True}
    try:
        process = subprocess.run(command, timeout=seconds, env=env, **options)
        return job._asdict() | json.loads(process.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        why = f"after {seconds:.3g} seconds"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [""]
        why = f"(exit status {error.returncode}): {lines[-1][:120]}"
    return job._asdict() | {"note": f"{_LOST}{why}"}
