"""Reports of a run: `metrics.jsonl`, TensorBoard, and one live line on the terminal."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from ttcd_jax import units
from ttcd_jax.files import write_whole
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.hardware import data_sheet
from ttcd_jax.train.loop import HostMetrics, MetricCallback


def say(line: str) -> None:
    """Prints a line, if this is the first process."""
    if jax.process_index() == 0:
        print(units.printable(line), flush=True)


@contextlib.contextmanager
def reporter(
    config: RunConfig, directory: Path, start: int
) -> Iterator[tuple[list[MetricCallback], Callable[[int, dict[str, float]], None]]]:
    """(callbacks that report a run every `log_every` steps, function that writes other metrics of a
    step); both do nothing but in the first process."""
    if jax.process_index():
        yield [], lambda step, record: None
        return
    progress = Progress(start, config.steps)
    tokens_per_step = config.batch_size * config.data.seq_len
    flops_per_token = training_flops_per_token(config.model, config.data.seq_len)
    sheet = data_sheet(jax.devices()[0].device_kind)

    def log(step: int, metrics: HostMetrics) -> None:
        rate = progress.update(step) * tokens_per_step
        record = flat_metrics(metrics) | {"tokens_per_second": rate}
        if sheet is not None:
            record["mfu"] = rate * flops_per_token / (sheet.peak_flops * jax.device_count())
        files.write(step, record)
        progress.show(step, record)

    with contextlib.closing(MetricFiles(directory, start=start)) as files:
        yield [MetricCallback(config.log_every, log)], files.write


def flat_metrics(metrics: HostMetrics) -> dict[str, float]:
    """Scalars by name; an array [fast layers] becomes name/0, name/1, ..."""
    flat = {}
    for name, value in metrics.items():
        if np.ndim(value) == 0:
            flat[name] = float(value)
        else:
            flat |= {f"{name}/{index}": float(x) for index, x in enumerate(value)}
    return flat


class MetricFiles:
    """Appends to `metrics.jsonl` and TensorBoard. Records after `start`, of a run interrupted
    before its next checkpoint, are dropped: training repeats them."""

    def __init__(self, directory: Path, *, start: int) -> None:
        path = directory / "metrics.jsonl"
        kept = [record for record in read_metrics(path) if record["step"] <= start]
        write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=start + 1)

    def write(self, step: int, record: dict[str, float]) -> None:
        """One line, on disk when this returns."""
        self._file.write(json.dumps({"step": step, **record}) + "\n")
        self._file.flush()
        for name, value in record.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete records; the torn last line of a killed run is skipped."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]


class Progress:
    """The speed of a run and one line per report, overwritten by the next on a terminal. The time
    left is unknown until the second report, since the first interval includes compilation."""

    def __init__(self, start: int, steps: int) -> None:
        self._steps, self._is_live = steps, sys.stdout.isatty()
        self._last = (start, time.monotonic())
        self._first: tuple[int, float] | None = None
        self._seconds_left: float | None = None

    def update(self, step: int) -> float:
        """Steps per second since the last call."""
        (last_step, last_time), now = self._last, time.monotonic()
        self._last = (step, now)
        if self._first is None:
            self._first = self._last
        else:
            first_step, first_time = self._first
            per_step = (now - first_time) / max(step - first_step, 1)
            self._seconds_left = per_step * (self._steps - step)
        return (step - last_step) / max(now - last_time, 1e-9)

    def show(self, step: int, record: dict[str, float]) -> None:
        """Prints the line of `step`."""
        parts = [
            f"step {step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {record['loss']:.4f}",
            f"{record['tokens_per_second']:,.0f} tokens/s",
        ]
        if self._seconds_left is not None:
            parts.append(f"{units.clock(self._seconds_left)} left")
        if ratios := [x for name, x in record.items() if name.startswith("memory_ratio")]:
            parts.append(f"|eta S|/|W| {max(ratios):.3f}")
        start = "\r\x1b[K" if self._is_live else ""
        end = "\n" if step == self._steps or not self._is_live else ""
        print(start + "  ".join(parts), end=end, flush=True)
