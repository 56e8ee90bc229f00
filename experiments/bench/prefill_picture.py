"""The pictures of the prefill benchmark: throughput by window, memory by length, decoding by batch
size."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttcd_jax.eval.report import plot_bars, plot_lines

Rows = Sequence[Mapping[str, Any]]


def draw_prefill(folder: Path, report: Mapping[str, Any]) -> list[Path]:
    """The PNGs of a report of `experiments.bench.prefill`, drawn into `folder`: a
    `prefill_<batch>x<length>.png` per setting, `memory.png` and, where it decoded, `decode.png`.

    Raises `UserError` without matplotlib.
    """
    rows, device = report["prefill"], report["environment"]["device"]
    settings = dict.fromkeys((row["batch_size"], row["length"]) for row in rows)
    drawn = [_draw_throughput(folder, device, rows, *setting) for setting in settings]
    drawn.append(_draw_memory(folder, report["memory"]))
    if report["decode"]:
        drawn.append(_draw_decoding(folder, device, report["decode"]))
    return drawn


def _draw_throughput(folder: Path, device: str, rows: Rows, batch_size: int, length: int) -> Path:
    path = folder / f"prefill_{batch_size}x{length}.png"
    rows = [row for row in rows if (row["batch_size"], row["length"]) == (batch_size, length)]
    windows = list(dict.fromkeys(row["window"] for row in rows))
    series = {}
    for label in _labels(rows):
        rates = {row["window"]: row["tokens_per_second"] for row in rows if row["label"] == label}
        series[label] = [_in_thousands(rates.get(window)) for window in windows]
    plot_bars(
        path,
        title=f"Prefill of {batch_size} x {length:,} tokens, {device}",
        x_label="attention window (the student's is half)",
        y_label="thousand tokens per second",
        groups=[f"{window:,}" for window in windows],
        series=series,
    )
    return path


def _draw_memory(folder: Path, rows: Rows) -> Path:
    path = folder / "memory.png"
    series = {}
    for key, kind in (("piece_bytes", "in pieces"), ("whole_bytes", "row at once")):
        for label in _labels(rows):
            chosen = [row for row in rows if row["label"] == label]
            sizes = [None if row[key] is None else row[key] / 2**30 for row in chosen]
            if any(size is not None for size in sizes):
                series[f"{label}, {kind}"] = [row["length"] for row in chosen], sizes
    plot_lines(
        path,
        title=f"Memory of a prefill, window {rows[0]['window']:,}, batch {rows[0]['batch_size']}",
        x_label="tokens of a row",
        y_label="GiB, parameters included",
        series=series,
        y_scale="log",
    )
    return path


def _draw_decoding(folder: Path, device: str, rows: Rows) -> Path:
    path = folder / "decode.png"
    series = {}
    for label in _labels(rows):
        chosen = [row for row in rows if row["label"] == label]
        batch_sizes = [row["batch_size"] for row in chosen]
        series[label] = batch_sizes, [row["tokens_per_second"] for row in chosen]
    plot_lines(
        path,
        title=f"Decoding, window {rows[0]['window']:,}, {device}",
        x_label="batch size",
        y_label="tokens per second",
        series=series,
        y_scale="log",
    )
    return path


def _labels(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["label"] for row in rows))


def _in_thousands(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e3
