"""Metrics of a run: `metrics.jsonl`, TensorBoard, and one live line on the terminal."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from ttcd_jax import units
from ttcd_jax.files import write_whole
from ttcd_jax.train.loop import HostMetrics


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
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


class Throughput:
    """Tokens per second since the last call, and the time left, of which the first interval, which
    includes compilation, is no measure."""

    def __init__(self, *, start: int, steps: int, tokens_per_step: int) -> None:
        self._steps, self._tokens = steps, tokens_per_step
        self._last = (start, time.monotonic())
        self._first: tuple[int, float] | None = None

    def update(self, step: int) -> tuple[float, float | None]:
        """(tokens per second, seconds left or None while unknown)."""
        now = time.monotonic()
        last_step, last_time = self._last
        self._last = (step, now)
        rate = (step - last_step) * self._tokens / max(now - last_time, 1e-9)
        if self._first is None:
            self._first = (step, now)
            return rate, None
        first_step, first_time = self._first
        per_step = (now - first_time) / max(step - first_step, 1)
        return rate, per_step * (self._steps - step)


class ProgressLine:
    """One line per report, overwritten by the next on a terminal."""

    def __init__(self, steps: int) -> None:
        self._steps, self._is_live = steps, sys.stdout.isatty()

    def show(self, step: int, record: dict[str, float], seconds_left: float | None) -> None:
        parts = [
            f"step {step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {record['loss']:.4f}",
            f"{record['tokens_per_second']:,.0f} tokens/s",
        ]
        if seconds_left is not None:
            parts.append(f"{units.clock(seconds_left)} left")
        if ratios := [x for name, x in record.items() if name.startswith("memory_ratio")]:
            parts.append(f"|eta S|/|W| {max(ratios):.3f}")
        start = "\r\x1b[K" if self._is_live else ""
        end = "\n" if step == self._steps or not self._is_live else ""
        print(start + "  ".join(parts), end=end, flush=True)
