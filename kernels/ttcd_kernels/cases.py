"""What `bench`, `check` and `tune` share: cases by command line, and rows in a file, computed each
in a process of its own.

A job of such a process is a NamedTuple of texts; its row has the fields of the job and what was
measured. A command that was interrupted goes on from its file.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ttcd_kernels import measure, verified
from ttcd_kernels.decode import bench as decode
from ttcd_kernels.dual_window import bench as dual_window
from ttcd_kernels.measure import FAILED, Row
from ttcd_kernels.table import write_json

OPS: dict[str, Any] = {"dual_window": dual_window, "decode": decode}
_LOST = f"{FAILED}no result "


def parser_of(
    command: str, about: str, ops: Sequence[str] = tuple(OPS), shapes: str | None = None
) -> ArgumentParser:
    """The options that commands share; `ops` and `shapes` are their defaults."""
    program = f"python -m ttcd_kernels.{command}"
    parser = ArgumentParser(program, description=about, allow_abbrev=False)
    parser.add_argument("--op", choices=OPS, nargs="+", default=[*ops], help="kernels of these ops")
    parser.add_argument("--output", type=Path, help="file for the report, written as it grows")
    if shapes is not None:
        sets = ("tiny", "cpu", "paper")
        parser.add_argument("--shapes", choices=sets, default=shapes, help="set of shapes")
        parser.add_argument("--case", nargs="+", default=[], help="names in the set (default: all)")
    return parser


def parsed(parser: ArgumentParser, arguments: list[str] | None) -> Namespace:
    """The options; processes that a command starts share a GPU. Ends the command where JAX finds no
    device, or refuses its variables."""
    if any(x.startswith("--json") for x in (sys.argv[1:] if arguments is None else arguments)):
        parser.error("--json is called --output here")
    options = parser.parse_args(arguments)
    if "shapes" in options:
        known = [case.name for op in options.op for case in OPS[op].SHAPES[options.shapes]]
        for name in options.case:
            if name not in known:
                parser.error(f"--case: no {name!r} in {options.shapes}; it has {', '.join(known)}")
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"--output: no folder {options.output.parent}; create it first")
    if "job" in options:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        jax.devices()
    except (RuntimeError, AssertionError, ValueError) as error:
        chosen, cause = os.environ.get("JAX_PLATFORMS"), str(error) or "no such device"
        print(f"error: JAX_PLATFORMS={chosen}: {cause.splitlines()[0]}: unset it", file=sys.stderr)
        raise SystemExit(2) from None
    return options


def cases(options: Namespace) -> Iterator[tuple[str, Any]]:
    for op in options.op:
        for case in OPS[op].SHAPES[options.shapes]:
            if not options.case or case.name in options.case:
                yield op, case


def environment() -> dict[str, Any]:
    """The device, versions and commit (`measure.environment`), also printed."""
    found = measure.environment()
    print(" ".join(f"{key}={value}" for key, value in found.items()), flush=True)
    return found


class Store(dict[tuple[str, ...], Row]):
    """The rows of a file of JSON, {**head, "rows": [...]}, by job; the head says on which machine
    and by which source they are measured. Without a file they are kept in this process."""

    def __init__(
        self, parser: ArgumentParser, file: Path | None, job: type[NamedTuple], **head: Any
    ) -> None:
        """Ends the command if the file is damaged, or of another head; clocks and commit of its
        environment may differ."""
        super().__init__()
        self._file, self._fields = file, job._fields
        self._head = {**head, "environment": environment(), "source": verified.source()}
        if file is None or not file.exists():
            return
        try:
            earlier = json.loads(file.read_text())
            self.update((self._key(row), row) for row in earlier.pop("rows"))
            is_same = _origin(earlier) == _origin(self._head)
            wrong = "" if is_same else "is of another machine, version or source"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            wrong = f"is no report of this command ({error!r})"
        if wrong:
            parser.error(f"--output: {file} {wrong}; name another file")

    def left(self, jobs: Sequence[Any], *, has_lost: bool = False) -> list[Any]:
        """The jobs without a row, and at the end, if wanted, those that were lost."""
        lost = [x for x in jobs if self.get(x, {}).get("note", "").startswith(_LOST)]
        return [*(x for x in jobs if x not in self), *(lost if has_lost else ())]

    def run(
        self,
        program: Sequence[str],
        jobs: Sequence[Any],
        seconds: float,
        at_most: int | None = None,
    ) -> Iterator[Row]:
        """The row of every job as it ends, added here and to the file, in a process each: as many
        at a time as there are cores, or at most so many."""
        cores = os.cpu_count() or 1
        pool = concurrent.futures.ThreadPoolExecutor(min(cores, at_most or cores))
        try:
            futures = [pool.submit(in_process, program, job, seconds) for job in jobs]
            for future in concurrent.futures.as_completed(futures):
                row = future.result()
                self[self._key(row)] = row
                write_json({**self._head, "rows": [*self.values()]}, self._file)
                yield row
        finally:
            pool.shutdown(cancel_futures=True)

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(row[name] for name in self._fields)


def _origin(head: Row) -> Row:
    return head | {"environment": {**head["environment"], "clocks": None, "commit": None}}


def in_process(program: Sequence[str], job: Any, seconds: float) -> Row:
    """The row that `python PROGRAM --job FIELD ...` prints last; one with a note if it crashes, or
    gives no result in so many seconds."""
    command = [sys.executable, *program, "--job", *job]
    env = os.environ | {"JAX_TRACEBACK_FILTERING": "off"}  # the last line is the error's
    options: Any = {"capture_output": True, "text": True, "check": True}
    try:
        process = subprocess.run(command, timeout=seconds, env=env, **options)
        return json.loads(process.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        why = f"after {seconds:g} seconds"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [""]
        why = f"(exit status {error.returncode}): {lines[-1][:120]}"
    return job._asdict() | {"note": f"{_LOST}{why}"}
