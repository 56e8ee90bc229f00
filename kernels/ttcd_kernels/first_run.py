"""The first minutes of the kernels on a GPU that they have not run on:

    python -m ttcd_kernels.first_run --minutes=9 --out=DIR

Runs `STEPS` one after another, each in a process that ends with its share of the clock: whether the
kernels are right, their time beside their peers, better tiles. DIR then has the report of every
step, `first_run.json` with how the steps ended, rewritten after each, and `first_run.log` with what
they printed. The same command goes on with the steps that have not ended by themselves. Exits with
1 if the kernels have not been found right.
"""

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from ttcd_kernels import bench, check, tune, verified
from ttcd_kernels.measure import Row
from ttcd_kernels.table import format_table

LONG = "64K 8192/4096 H16/8 D128"  # the case that the tiles are chosen for
_LEAST_SECONDS = 10  # to start a step at all
_ENDED = ("passed", "failed")  # by itself: not to be repeated


class Step(NamedTuple):
    """A Python program that takes `--json FILE`."""

    name: str
    arguments: tuple[str, ...]
    until: float  # the share of the clock at which it is ended


def _times(*arguments: str) -> tuple[str, ...]:
    return "-m", "ttcd_kernels.bench", "--times_only", "--shapes", "paper", *arguments


CHECK, TILES = "check", "tiles"
STEPS = (
    Step(CHECK, ("-m", "ttcd_kernels.check"), 0.35),
    Step(
        "times",
        _times(
            *("--op", "dual_window", "--case", LONG),
            *("--implementation", "triton", "cudnn teacher", "cudnn both"),
        ),
        0.5,
    ),
    Step(
        "times_hopper",
        _times(
            *("--op", "dual_window", "--case", LONG),
            *("--implementation", "mosaic", "cudnn teacher", "cudnn both"),
        ),
        0.6,
    ),
    Step(TILES, ("-m", "ttcd_kernels.tune", "--case", LONG), 0.9),
    Step(
        "times_small",
        _times(
            *("--case", "760M: 32K 2048/1024 H24 D64", "B8 8192/4096 H16/8 D128"),
            *("--implementation", "triton", "cudnn both", "jax.nn twice"),
        ),
        1.0,
    ),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ttcd_kernels.first_run",
        description="The first minutes of the kernels on a GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, required=True, help="the clock of this call")
    parser.add_argument("--out", type=Path, required=True, help="folder for the reports")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < float("inf"):
        parser.error(f"--minutes {options.minutes:g}: it must be a number above 0")
    if not options.out.absolute().parent.is_dir():
        parser.error(f"--out: no folder {options.out.absolute().parent}; create it first")
    signal.signal(signal.SIGTERM, _end)  # and the step with it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU
    try:
        options.out.mkdir(exist_ok=True)
        with (options.out / "first_run.log").open("a") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # steps inherit the lock
            records = _records(options.out / "first_run.json", parser)
            run_all(options.out, 60 * options.minutes, records, log)
    except BlockingIOError:
        parser.error(f"--out: a step of an earlier call still runs in {options.out}; end it first")
    except OSError as error:
        parser.error(f"--out: {error}")
    timed = times(options.out)
    tables = [format_table(rows) for rows in ([*records.values()], timed) if rows]
    print("", "\n\n".join(tables), *advice(options.out), sep="\n", flush=True)
    if records[CHECK]["outcome"] != "passed":
        raise SystemExit(f"the kernels have not been found right: {options.out}/first_run.log")


def run_all(out: Path, clock: float, records: dict[str, Row], log: TextIO) -> None:
    """Runs the steps that `records` does not have as ended, and records how they end."""
    start = time.monotonic()
    for step in STEPS:
        if step.name in records and records[step.name]["outcome"] in _ENDED:
            print(f"{step.name}: {records[step.name]['outcome']} in an earlier call", flush=True)
            continue
        left = start + step.until * clock - time.monotonic()
        print(f"{step.name}: at most {max(left, 0):.0f} s", flush=True)
        records[step.name] = run(step, out, left, log)
        report = {"source": verified.source(), "steps": [*records.values()]}
        bench.write(report, out / "first_run.json")


def run(step: Step, out: Path, seconds: float, log: TextIO) -> Row:
    """How a step ended, with the last line that it printed."""
    if seconds < _LEAST_SECONDS:
        return {"step": step.name, "outcome": "not started", "seconds": 0, "last line": ""}
    log.write(f"\n== {step.name}\n")
    log.flush()
    begin, start = log.tell(), time.monotonic()
    command = [sys.executable, *step.arguments, "--json", str(out / f"{step.name}.json")]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        outcome = "passed" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        outcome = "out of time"
    finally:  # its own processes too, which a step that crashes leaves behind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with open(log.name, errors="replace") as file:
        file.seek(begin)
        lines = file.read().split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    spent = round(time.monotonic() - start, 1)
    return {"step": step.name, "outcome": outcome, "seconds": spent, "last line": last[:160]}


def times(out: Path) -> list[Row]:
    """The rows of the steps that time kernels beside their peers, in short."""
    columns = ("case", "pass", "implementation", "time ms", "% of floor", "note")
    found = []
    for step in STEPS:
        file = out / f"{step.name}.json"
        report = json.loads(file.read_text()) if file.exists() else {}
        rows = [row for op in report.get("ops", {}).values() for row in op["rows"]]
        found += [{name: row[name] for name in columns} for row in rows]
    return found


def advice(out: Path) -> list[str]:
    """What to change, by the reports so far."""
    lines = []
    for name, of_report in ((CHECK, check.advice), (TILES, tune.advice)):
        file = out / f"{name}.json"
        if file.exists():
            lines += of_report(json.loads(file.read_text()))
    return lines


def _records(file: Path, parser: argparse.ArgumentParser) -> dict[str, Row]:
    """How the steps of earlier calls ended; only where they ran this source."""
    if not file.exists():
        return {}
    try:
        report = json.loads(file.read_text())
        records = {row["step"]: row for row in report["steps"] if row["outcome"]}
        is_same = report["source"] == verified.source()
    except (ValueError, TypeError, KeyError) as error:
        parser.error(f"--out: {file} is no report of this command ({error}); name another folder")
    if not is_same:
        parser.error(f"--out: {file.parent} has results of other kernels; name another folder")
    return records


def _end(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
