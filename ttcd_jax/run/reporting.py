"""Reports of a run: `metrics.jsonl`, TensorBoard, other trackers, and one live line on the
terminal. None of them can end it: one that fails is a warning, once."""

import contextlib
import json
import math
import os
import socket
import statistics
import struct
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar
from tensorboardX.writer import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

from ttcd_jax.errors import DataError
from ttcd_jax.files import GrowingFile, write_whole
from ttcd_jax.models.config import training_flops_per_token
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.directory import METRICS
from ttcd_jax.run.trackers import Guarded, Tracker
from ttcd_jax.terminal import Progress
from ttcd_jax.train.bad_steps import fault
from ttcd_jax.train.hardware import data_sheet
from ttcd_jax.train.loop import HostMetrics, MetricCallback
from ttcd_jax.train.watchdog import Watchdog


@contextlib.contextmanager
def reporter(
    config: RunConfig, directory: Path, start: int, trackers: Sequence[Tracker], watchdog: Watchdog
) -> Iterator[tuple[list[MetricCallback], Callable[[int, dict[str, Any]], None]]]:
    """(callbacks that report a run every `log_every` steps, a writer of other metrics of a step);
    both do nothing outside the first process."""
    if jax.process_index():
        yield [], lambda step, record: None
        return
    files, others = MetricFiles(directory, start), [Guarded(tracker) for tracker in trackers]
    for tracker in others:
        tracker.call("start", directory, config.to_dict(), start)
    progress = Progress(sys.stdout, config.steps, start)
    tokens_per_step = config.batch_size * config.data.seq_len
    flops_per_token = training_flops_per_token(config.model, config.data.seq_len)
    sheet = data_sheet(jax.devices()[0].device_kind)
    waited, called, nulls, memories = 0.0, 0.0, set(), MemoryWatch()

    def write(step: int, record: dict[str, Any]) -> None:
        odd = {x for x, y in record.items() if isinstance(y, float) and not math.isfinite(y)}
        if "skipped" not in record and (new := sorted(odd - nulls)):
            nulls.update(new)
            logging.warning("step %d: not finite, null in the metrics: %s", step, ", ".join(new))
        is_new = files.write(step, record | dict.fromkeys(odd))
        for tracker in others if is_new else ():
            tracker.call("write", step, {x: y for x, y in record.items() if x not in odd})

    def log(step: int, metrics: HostMetrics) -> None:
        nonlocal waited, called
        record: dict[str, Any] = {  # an array [fast layers] becomes name/0, name/1, ...
            "/".join([name, *map(str, index)]): float(x)
            for name, value in metrics.items()
            for index, x in np.ndenumerate(value)
            if name != "is_skipped"
        }
        (last_step, last_time), left = progress.last, progress.left(step)
        before, waited = (waited, called), record.pop("data_seconds")
        called = record.pop("callback_seconds")  # in evaluations and saves, which are no training
        steps, seconds = step - last_step, progress.last[1] - last_time - (called - before[1])
        seconds = max(seconds, 1e-9)
        rate = steps * tokens_per_step / seconds
        record |= {"tokens_per_second": rate, "data_wait": (waited - before[0]) / seconds}
        if sheet is not None:
            record["mfu"] = rate * flops_per_token / (sheet.peak_flops * jax.device_count())
        if reason := fault(metrics):
            record |= {"skipped": reason, "rows": (rows := batch_rows(config, step))}
            text = "step %d is skipped (%s): rows %d .. %d of the data, %d of at most %d steps"
            counts = record["skipped_steps"], config.max_skipped_steps
            logging.warning(text, step, reason, *rows, *counts)
        write(step, record)
        _show(progress, step, left, config.steps, record)
        memories.warn(step, record, is_last=step == config.steps)

    try:
        yield [MetricCallback(config.log_every, log)], write
    finally:
        with watchdog.paused():
            for tracker in others:
                tracker.call("close")


_QUIETER = (
    "lower eta of the memory's settings or the rate of its layers (OptimizerConfig.rates), or set "
    "corrects_errors where there is one (docs/loudness.md)"
)
_NO_GAP = (
    "the windows make hardly anything of what this memory stores: whether it distils, a run with "
    "equal windows says; see docs/memory.md"
)
_FINDINGS = {  # of a metric: its bound, 1 where more is bad and -1 where less is, what that means
    "memory_ratio": (2.0, 1, f"the memory outgrows its weight: {_QUIETER}"),
    "gate_mean": (0.01, -1, f"the gate of the memory shuts: {_QUIETER}"),
    "window_share": (0.05, -1, _NO_GAP),
}


class MemoryWatch:
    """Warns of memories by the median of the last 20 logged values, from the tenth on, of a shorter
    run at its end from the fifth; again after ten times as many steps, of one that grows also when
    it has doubled."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))
        self._warned: dict[str, tuple[int, float]] = {}

    def warn(self, step: int, record: dict[str, Any], *, is_last: bool = False) -> None:
        for name in (x for x in record if x.partition("/")[0] in _FINDINGS):
            values, (bound, sign, finding) = self._values[name], _FINDINGS[name.partition("/")[0]]
            values.extend([] if math.isnan(record[name]) else [record[name]])
            if len(values) < (5 if is_last else 10):
                continue
            now = (max(median := statistics.median(values), 1e-30) / bound) ** sign
            warned_step, warned = self._warned.get(name, (0, 0.0))
            if now > 1 and (step >= 10 * warned_step or (sign > 0 and now > 2 * warned)):
                self._warned[name] = step, now
                text = "step %d: %s is %.3g, the median of %d logged values: %s"
                logging.warning(text, step, name, median, len(values), finding)


def batch_rows(config: RunConfig, step: int) -> tuple[int, int]:
    """The first and the last row of the batch of the `step`-th step, in the order of the data."""
    return (step - 1) * config.batch_size, step * config.batch_size - 1


class MetricFiles:
    """`metrics.jsonl` and TensorBoard. Records after step `start`, of a run interrupted before its
    next checkpoint, are set aside: training repeats those steps."""

    def __init__(self, run_dir: Path, start: int) -> None:
        path = run_dir / METRICS
        aside = path.with_name(f"{METRICS}.repeated")
        records = read_metrics(path)
        later = {_key(x): x for x in read_metrics(aside) + records if x["step"] > start}
        if later:
            _write_records(aside, later.values())
        _write_records(path, (x for x in records if x["step"] <= start))
        self._repeated = later.keys()
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._lines, self._events = GrowingFile(path), GrowingFile(run_dir / "tensorboard" / name)
        begun = SessionLog(status=SessionLog.START)  # hides the records that are repeated
        self._events.append(_framed(Event(file_version="brain.Event:2")))
        self._events.append(_framed(Event(step=start + 1, session_log=begun)))

    def write(self, step: int, record: dict[str, Any]) -> bool:
        """Appends one record, on disk when this returns; TensorBoard gets its numbers. Returns
        whether it is the first of its kind, not one that a run wrote before it was interrupted."""
        line = {"step": step} | record
        self._lines.append(json.dumps(line, allow_nan=False).encode() + b"\n")
        event = Event(step=step)
        for name, value in record.items():
            if isinstance(value, int | float):
                event.summary.MergeFrom(scalar(name, value))
        self._events.append(_framed(event))
        return _key(line) not in self._repeated


def _key(record: dict[str, Any]) -> tuple[int, str]:
    """The step of a record and its first metric, which tell it from all others."""
    return record["step"], next((name for name in record if name != "step"), "")


def _write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    if content != (path.read_bytes() if path.exists() else b""):  # else nothing can fail
        write_whole(path, content)


def _framed(event: Event) -> bytes:
    """The record of an event in a TensorBoard file. The library's own writer is a thread behind a
    queue, which hangs the run on a full disk."""
    event.wall_time = time.time()
    content = event.SerializeToString()
    parts = (struct.pack("<Q", len(content)), content)
    return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in parts)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All intact records of a `metrics.jsonl`. A damaged line gives a warning, but not the last,
    which a killed run leaves torn."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no regular file; move it away")
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; move it away") from error
    records = [record for line in lines[:-1] if (record := _record(line)) is not None]
    if damaged := len(lines) - 1 - len(records):
        logging.warning("%s: %d of %d lines are damaged, skipped", path, damaged, len(lines) - 1)
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _show(progress: Progress, step: int, left: str, steps: int, record: dict[str, float]) -> None:
    """Shows the line of a report."""
    parts = [f"step {step:>{len(str(steps))}}/{steps}", f"loss {record['loss']:.4f}"]
    parts += [f"{record['tokens_per_second']:,.0f} tokens/s", left]
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    ratios = [x for name, x in record.items() if name.startswith("memory_ratio")]
    if ratios := [x for x in ratios if math.isfinite(x)]:
        parts.append(f"|eta S|/|W| {max(ratios):.3f}")
    if (wait := record.get("data_wait", 0)) > 0.02:
        parts.append(f"{wait:.0%} waiting for data")
    if skipped := record.get("skipped_steps"):
        parts.append(f"{skipped:.0f} skipped")
    progress.show("  ".join(parts), is_last=step == steps)
