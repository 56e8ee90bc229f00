"""The tables of the paper that the tasks here measure, from `published.json`."""

import functools
import json
from pathlib import Path

from ttcd_jax.eval.page import Published


def published(task: str) -> list[Published]:
    """The published tables of a task; none for a task that the paper has no numbers of."""
    return [Published(table["title"], table["rows"]) for table in _tables().get(task, [])]


@functools.cache
def _tables() -> dict[str, list[dict]]:
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
