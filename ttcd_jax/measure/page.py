"""The HTML page of a report, in one file: pictures are embedded, nothing is fetched.

jinja2 is optional: without it there is no page, and a warning.
"""

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import logging
from ttcd_kernels.table import Row, cells

from ttcd_jax.files import write_whole
from ttcd_jax.measure.pictures import Picture


class Published(NamedTuple):
    """A table of the paper: other models, data and hardware than those of the page."""

    title: str
    rows: Sequence[Row]


class Section(NamedTuple):
    """A section of a page: its pictures, relative to the page or absolute, the table measured here,
    and the published ones."""

    title: str
    table: Sequence[Row]
    pictures: Sequence[Picture]
    published: Sequence[Published] = ()


def write_page(
    path: Path,
    *,
    title: str,
    runs: Sequence[Row] = (),
    colours: Mapping[str, str] | None = None,
    sections: Sequence[Section] = (),
    next_steps: Sequence[str] = (),
) -> None:
    """The HTML page: a table of the runs, whose column `run` has the colour `colours[run]` of their
    curves, sections with an index, next steps. Text is escaped; backticks in a sentence or a next
    step mark code."""
    try:
        import jinja2
    except ImportError:
        path.unlink(missing_ok=True)
        logging.warning("no page: jinja2 is missing, install ttcd_jax[report]")
        return
    drawn = [(x, [y for y in x.pictures if (path.parent / y.path).exists()]) for x in sections]
    sections = [section._replace(pictures=pictures) for section, pictures in drawn]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    colours = dict(colours or {})
    environment.globals.update(
        cells=cells,
        colours=colours,
        grouped=lambda header: _grouped([name for name, _ in header], [*colours]),
        image=lambda file: base64.b64encode((path.parent / file).read_bytes()).decode(),
    )
    template = environment.get_template("page.html")
    content = {"title": title, "runs": runs, "sections": sections, "next_steps": next_steps}
    write_whole(path, template.render(content))


def _grouped(names: Sequence[str], runs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(run or nothing, its columns without its name): adjacent columns that are named by a run and
    a comma; empty where no run has two of them."""
    owners = [
        max((x for x in runs if name.startswith(f"{x}, ")), key=len, default="") for name in names
    ]
    columns = zip(owners, names, strict=True)
    groups = [
        (run, [name.removeprefix(f"{run}, ") for _, name in members])
        for run, members in itertools.groupby(columns, key=lambda column: column[0])
    ]
    return groups if any(run and len(members) > 1 for run, members in groups) else []


def published(task: str) -> list[Published]:
    """The published tables of a task; none for a task that the paper has no numbers of."""
    tables = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return [Published(**table) for table in tables.get(task, [])]
