"""The records of a study, of which `experiments.pages` draws tables: a line of JSON for every row
of its tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttcd_kernels.measure import environment

from experiments.study.runs import Recipe, StudyConfig
from ttcd_jax.files import read_json, write_whole
from ttcd_jax.measure.page import Section
from ttcd_jax.measure.task import digest
from ttcd_jax.run.directory import RunDirectory


def write_records(
    config: StudyConfig,
    recipes: dict[str, Recipe],
    sections: Sequence[Section],
    path: Path,
    file: Path,
    command: str,
) -> None:
    """Writes what holds for all lines, then the rows, [mean, half] where a cell has an interval.
    `recipes`: the file of each, and the digest of its configuration without the seed."""
    machine, trained, commits = environment(), {}, set()
    for name, seed in config.chosen(recipes):
        if (run := RunDirectory(path / f"{name}-{seed}")).is_claimed:
            found = run.read_config() | dict.fromkeys(("seed", "sha256"))
            text = json.dumps(found, sort_keys=True)
            trained[name] = recipes[name].file, digest(text)[:12]
            commits.add(read_json(run.path / "environment.json").get("commit") or "unknown")
    head = {
        "command": command,
        "commit": ", ".join(sorted(commits)),
        "device": f"{machine['cpu_count']} x {machine['device']}",
        "seeds": config.seeds,
        "recipes": trained,
    }
    if any(isinstance(_number(x), list) for y in sections for row in y.table for x in row.values()):
        head["interval"] = f"seeds and pieces of {config.piece_bytes:,} bytes, in pairs"
    lines: list[Any] = [head]
    for section in sections:
        for row in section.table:
            cells = {x: _number(cell) for x, cell in row.items() if x != "directory"}
            lines.append({"row": next(iter(row.values())), "section": section.title} | cells)
    write_whole(file, "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines))


def _number(cell: Any) -> Any:
    parts = cell.replace(",", "").split(" ± ") if isinstance(cell, str) else ()
    return [*map(float, parts)] if len(parts) == 2 else cell
