"""Cases of a measurement: their rows in a file, computed each in a process of its own.

A case is a NamedTuple of texts; its row has the fields of the case and what was measured. A command
that was interrupted goes on from its file: the row of a case that is there is not computed again,
that of one which was lost with its process if the command wants it.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ttcd_kernels.measure import FAILED, Row
from ttcd_kernels.table import write_json

_LOST = f"{FAILED}no result "


class Store(dict[tuple[Any, ...], Row]):
    """The rows of a file of JSON, {**head, "rows": [...]}, by case; `head` says what they are
    measured on. Without a file they are kept in this process."""

    def __init__(self, file: Path | None, case: type[NamedTuple], head: Row) -> None:
        """Raises `ValueError` for a file that is damaged, or of another head; clocks and commit of
        its environment may differ."""
        super().__init__()
        self._file, self._head, self._fields = file, head, case._fields
        if file is None or not file.exists():
            return
        try:
            earlier = json.loads(file.read_text())
            self.update((self._key(row), row) for row in earlier.pop("rows"))
            is_same = _origin(earlier) == _origin(head)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no report of this command ({error!r})") from error
        if not is_same:
            raise ValueError(f"{file} is of another machine, version or source")

    def left(self, cases: Sequence[Any], *, has_lost: bool = False) -> list[Any]:
        """The cases without a row, and at the end, if wanted, those that were lost."""
        lost = [x for x in cases if self.get(x, {}).get("note", "").startswith(_LOST)]
        return [*(x for x in cases if x not in self), *(lost if has_lost else ())]

    def add(self, row: Row) -> None:
        """Adds a row, or replaces that of its case, and writes the file."""
        self[self._key(row)] = row
        write_json({**self._head, "rows": [*self.values()]}, self._file)

    def _key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._fields)


def _origin(head: Row) -> Row:
    return head | {"environment": {**head["environment"], "clocks": None, "commit": None}}


def in_processes(
    program: Sequence[str], cases: Sequence[NamedTuple], seconds: float, at_most: int | None = None
) -> Iterator[Row]:
    """The row of every case as it ends, in a process each: as many at a time as there are cores, or
    at most so many."""
    cores = os.cpu_count() or 1
    pool = concurrent.futures.ThreadPoolExecutor(min(cores, at_most or cores))
    try:
        futures = [pool.submit(in_process, program, case, seconds) for case in cases]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def in_process(program: Sequence[str], case: NamedTuple, seconds: float) -> Row:
    """The row that `python PROGRAM --job FIELD ...` prints last; one with a note if it crashes, or
    gives no result in so many seconds."""
    command = [sys.executable, *program, "--job", *case]
    env = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # the last line is the error's
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return case._asdict() | {"note": f"{_LOST}after {seconds:g} seconds"}
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [""]
        why = f"(exit status {process.returncode}): {lines[-1][:120]}"
        return case._asdict() | {"note": f"{_LOST}{why}"}
    return json.loads(process.stdout.splitlines()[-1])
