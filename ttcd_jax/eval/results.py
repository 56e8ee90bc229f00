"""Results on disk: JSON, CSV and a picture in one folder, by task."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from ttcd_jax.errors import UserError
from ttcd_jax.eval.report import plot_bars, plot_lines
from ttcd_jax.files import write_json, write_whole

Records = list[dict[str, Any]]


def write_results(folder: Path, result: dict[str, Any]) -> None:
    """`results.json` (everything), `results.csv` (all series in one table), `<task>.png`.

    `result` has `task`, `title`, `series` {label: records} and facts such as the step.
    """
    table = io.StringIO()
    rows = [{"series": label} | row for label, rows in result["series"].items() for row in rows]
    writer = csv.DictWriter(table, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / "results.csv", table.getvalue())
    plot(folder / f"{result['task']}.png", result)
    write_json(folder / "results.json", result)


def read_results(run_dir: Path, task: str) -> dict[str, Any] | None:
    """The results of one task of a run, None if it was not evaluated."""
    path = run_dir / "eval" / task / "results.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): evaluate again") from error


def plot(path: Path, result: dict[str, Any]) -> None:
    """The picture of a task: lines over the context length, or bars over distance."""
    if _is_text(result):
        unit, label = _unit(result)
        series = {
            name: ([row["stop"] for row in _buckets(rows)], [row[unit] for row in _buckets(rows)])
            for name, rows in result["series"].items()
        }
        plot_lines(
            path,
            title=result["title"],
            x_label="context length (tokens)",
            y_label=label,
            series=series,
            x_scale="log",
        )
        return
    first = next(iter(result["series"].values()))
    plot_bars(
        path,
        title=result["title"],
        x_label="tokens decoded between the value and the query"
        if result["task"] == "needle"
        else "distance from the query back to the value (tokens)",
        y_label="accuracy",
        groups=[row["distance"] for row in first],
        series={name: [r["accuracy"] for r in rows] for name, rows in result["series"].items()},
        reference_lines={"chance": result["chance"]},
    )


def table(result: dict[str, Any]) -> Records:
    """One row per bucket, one column per series; the title names the unit."""
    key, value = ("context", _unit(result)[0]) if _is_text(result) else ("distance", "accuracy")
    first = next(iter(result["series"].values()))
    return [
        {key: row[key]} | {name: rows[i][value] for name, rows in result["series"].items()}
        for i, row in enumerate(first)
    ]


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one task as one result, series by series. Raises `UserError` when their
    buckets differ."""
    whole = results[0] | {"series": {}}
    for result in results:
        for label, rows in result["series"].items():
            key = "context" if _is_text(result) else "distance"
            first = next(iter(whole["series"].values()), rows)
            if [row[key] for row in first] != [row[key] for row in rows]:
                raise UserError(
                    f"{result['run_dir']} was evaluated in other buckets than "
                    f"{whole['run_dir']}: evaluate both at the same length"
                )
            whole["series"][label] = rows
    return whole


def _is_text(result: dict[str, Any]) -> bool:
    return result["task"] == "ppl"


def _buckets(rows: Records) -> Records:
    return [row for row in rows if row["context"] != "all"]


def _unit(result: dict[str, Any]) -> tuple[str, str]:
    rows = next(iter(result["series"].values()))
    if all(row["bits_per_byte"] is not None for row in rows):
        return "bits_per_byte", "bits per byte"
    return "perplexity", "perplexity"
