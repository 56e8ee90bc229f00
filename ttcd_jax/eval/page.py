"""The HTML page of a report, in one file: pictures are embedded, nothing is fetched.

jinja2 is optional: without it `write_page` raises `UserError`.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ttcd_kernels.table import Row, cells

from ttcd_jax.errors import UserError
from ttcd_jax.eval.report import Picture
from ttcd_jax.files import write_whole


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
    except ImportError as error:
        raise UserError("the report page needs jinja2; install ttcd_jax[report]") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(cells=cells, image=lambda file: _image(path.parent / file))
    page = environment.get_template("page.html").render(
        title=title,
        runs=runs,
        colours=colours or {},
        sections=sections,
        next_steps=next_steps,
    )
    write_whole(path, page)


def _image(path: Path) -> str:
    """A picture as the source of an <img>."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
