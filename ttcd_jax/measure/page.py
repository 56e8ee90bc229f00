"""The HTML page of a report, in one file: pictures are embedded, nothing is fetched. Answers come
first, then the story; details are folded.

jinja2 is optional: without it there is no page, and a warning.
"""

import base64
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging
from ttcd_kernels.table import Row, cells

from ttcd_jax.files import write_whole
from ttcd_jax.measure.pictures import Picture


class Answer(NamedTuple):
    """What a page says first: the verdict, and the sentences that found it."""

    verdict: str
    text: str


class Section(NamedTuple):
    """A section of a page: the table measured here, its pictures, relative to the page or absolute,
    and those of the paper: of other models, data and hardware; lines of text above the table. One
    that is a detail is folded, and below the others."""

    title: str
    table: Sequence[Row]
    pictures: Sequence[Picture] = ()
    published: Sequence["Section"] = ()
    lines: Sequence[str] = ()
    is_detail: bool = False


def write_page(
    path: Path,
    *,
    title: str,
    runs: Sequence[Row] = (),
    colours: Mapping[str, str] | None = None,
    sections: Sequence[Section] = (),
    next_steps: Sequence[str] = (),
    answers: Sequence[Answer] = (),
    views: str = "",
) -> None:
    """The HTML page: answers, a table of the runs, whose column `run` has the colour `colours[run]`
    of their curves, sections with an index, next steps, and HTML as it is, `views`. Other text is
    escaped; backticks in a sentence or a next step mark code."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        path.unlink(missing_ok=True)
        message = "no page: jinja2 is missing, install ttcd_jax[report]"
        logging.log_first_n(logging.WARNING, message, 1)
        return
    drawn = [(x, [y for y in x.pictures if (path.parent / y.path).exists()]) for x in sections]
    sections = [section._replace(pictures=pictures) for section, pictures in drawn]
    numbers = itertools.count(1)

    def image(picture: Picture) -> Any:
        """The picture as elements of the page; names in an SVG are its own."""
        content = (path.parent / picture.path).read_bytes()
        if picture.path.suffix == ".svg":
            names, own = r'(\bid="|href="#|url\(#)', rf"\1f{next(numbers)}-"
            svg = re.sub(r"\s*<style.*?</style>\s*", "", content.decode(), flags=re.DOTALL)
            return Markup(re.sub(names, own, svg))
        data = base64.b64encode(content).decode()
        text = '<img src="data:image/png;base64,{}" alt="{}">'
        return Markup(text).format(data, picture.sentence)

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        **{"title": title, "runs": runs, "sections": sections, "next_steps": next_steps},
        **{"answers": answers, "views": Markup(views), "colours": colours or {}},
        **{"cells": cells, "image": image},
        grouped=lambda header: _grouped([name for name, _ in header], [*(colours or ())]),
    )
    write_whole(path, page)


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


def published(task: str) -> list[Section]:
    """The published tables of a task; none for a task that the paper has no numbers of."""
    tables = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return [Section(x["title"], x["rows"]) for x in tables.get(task, [])]
