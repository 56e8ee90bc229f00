"""Draws the measured tables and pictures of the pages from the files in experiments/records.

    python -m experiments.pages

A file of records is one of JSON lines: the first has what holds for all others (command, commit,
device, seeds, tokens, what an interval is over), every other one is a measured row, and its field
`row` is the name of it. `experiments.study --records=FILE` writes such a file. A table stands on a
page between `<!-- table: NAME -->`, at the end of a paragraph, and `<!-- end -->`; `pages.toml`,
beside the records, says of every NAME which records, rows and columns it has, and of every picture
what it draws.
"""

import functools
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import cli
from ttcd_jax.errors import DataError
from ttcd_jax.files import parse_json, write_whole
from ttcd_jax.measure.pictures import plot_bars, plot_lines

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "experiments/records"
PAGES = (
    *(ROOT / "README.md", ROOT / "experiments/RESULTS.md"),
    *sorted((ROOT / "docs").glob("*.md")),
)
_BLOCK = re.compile(r"(<!-- table: (\S+) -->)\n.*?(<!-- end -->)", re.DOTALL)

type Spec = dict[str, Any]


def main(argv: list[str]) -> None:
    for page in PAGES:
        write_whole(page, drawn(page))
    for name, spec in specs()["picture"].items():
        draw(spec, ROOT / "docs" / f"{name}.png")


def specs(folder: Path = RECORDS) -> Spec:
    """The tables and pictures by name."""
    return tomllib.loads((folder / "pages.toml").read_text(encoding="utf-8"))


def read_records(file: Path) -> list[Spec]:
    """The lines of a file of records, what holds for all of them first."""
    return [parse_json(line, file) for line in file.read_bytes().splitlines()]


def drawn(page: Path, folder: Path = RECORDS) -> str:
    """The text of a page with its tables as the records have them. Under the first table of a file
    of records stands how they were measured. Raises `DataError` for a table without a spec."""
    tables, seen = specs(folder)["table"], set[Path]()

    def block(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in tables:
            raise DataError(f"{page} has a table {name} that pages.toml lacks: name it there")
        spec = tables[name]
        file = folder / f"{spec.get('records', name)}.jsonl"
        if not file.exists():
            return f"{start}\n\nNo record yet: `{spec['command']}`. {end}"
        lines = "\n".join(_table(spec, _records(spec, file)))
        if file in seen or not spec.get("note", True):
            return f"{start}\n\n{lines}\n{end}"
        seen.add(file)
        note = _note(read_records(file)[0], os.path.relpath(file, page.parent))
        return f"{start}\n\n{lines}\n\n{note} {end}"

    return _BLOCK.sub(block, page.read_text(encoding="utf-8"))


def _records(spec: Spec, file: Path) -> list[Spec]:
    """The rows of a table or picture: `rows` names them, in that order, `where` has fields."""
    found = [
        record
        for record in read_records(file)[1:]
        if all(record.get(name) == value for name, value in spec.get("where", {}).items())
    ]
    names = spec.get("rows", [*dict.fromkeys(record["row"] for record in found)])
    if missing := {*names} - {record["row"] for record in found}:
        raise DataError(f"{file} has no row {', '.join(sorted(missing))}: mend pages.toml")
    return sorted(filter(lambda x: x["row"] in names, found), key=lambda x: names.index(x["row"]))


def _table(spec: Spec, records: list[Spec]) -> Iterator[str]:
    """The lines of a table: one of the page has `across` records side by side."""
    columns = [(x, x) if isinstance(x, str) else x for x in spec["columns"]]
    across = spec.get("across", 1)
    num_lines = -(-len(records) // across)
    head = [spec.get("first", ""), *(heading for heading, *_ in columns)] * across
    yield _line(head)
    yield f"|{'---|' * len(head)}"
    for index in range(num_lines):
        beside = records[index::num_lines]
        yield _line([x for record in beside for x in (record["row"], *_cells(spec, record))])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |"


def _cells(spec: Spec, record: Spec) -> Iterator[str]:
    """The text of a record's columns: a field, or text with fields in braces; a list is joined as
    its column says."""
    number = spec.get("number", ".3f")
    for column in spec["columns"]:
        _, field, *join = [column, column] if isinstance(column, str) else column
        text = functools.partial(_text, number=number, join=[*join, spec.get("join", " ± ")][0])
        in_braces = re.sub(r"{(.*?)}", lambda name: text(record.get(name[1])), field)
        yield in_braces if "{" in field else text(record.get(field))


def _text(value: Any, number: str, join: str) -> str:
    if isinstance(value, list):
        return join.join(_text(x, number, join) for x in value)
    if isinstance(value, float | int):
        return f"{value:{number if isinstance(value, float) else ','}}"
    return "-" if value is None else value


def _note(head: Spec, link: str) -> str:
    """How the records of a file were measured."""
    seeds = "seed " + ", ".join(map(str, head["seeds"])) if "seeds" in head else None
    over = f"± is half of a 95 % interval over {head['interval']}" if "interval" in head else None
    parts = [head.get("on"), head.get("tokens"), seeds, head["device"], f"commit {head['commit']}"]
    where = f"[record]({link})" + (f", from the {x}" if (x := head.get("source")) else "")
    return f"`{head['command']}`: {'; '.join(filter(None, (*parts, over, where)))}."


def draw(spec: Spec, path: Path, folder: Path = RECORDS) -> None:
    """A picture with a series per record: lines with their intervals, or `bars`, at `x`."""
    series, bands, fields = {}, {}, spec["x"]
    for record in _records(spec, folder / f"{spec.get('records', path.stem)}.jsonl"):
        found = [x if isinstance(x, list) else [x] for x in map(record.get, fields)]
        series[record["row"]] = [values[0] for values in found]
        if all(len(values) > 1 for values in found):
            bands[record["row"]] = [[x - s * half for x, half in found] for s in (1, -1)]
    labels = {x: spec[x] for x in ("title", "x_label", "y_label", "chance") if x in spec}
    if spec.get("bars"):
        plot_bars(path, groups=fields, series=series, **labels)
        return
    lines = {name: (fields, values) for name, values in series.items()}
    plot_lines(path, series=lines, bands=bands, **labels)


if __name__ == "__main__":
    cli.run(main)
