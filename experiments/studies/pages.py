"""Draws the measured tables and pictures of the pages from the files in experiments/records.

    python -m experiments.pages

A file of records is one of JSON lines: the first has what holds for all others (command, commit,
device, seeds, tokens, what an interval is over), every other one is a measured row, and its field
`row` is the name of it. `experiments.study --records=FILE` writes such a file. A table stands on a
page between `<!-- table: NAME -->` and `<!-- end -->`; `pages.toml`, beside the records, says of
every NAME which records, rows and columns it has, and of every picture what it draws.
"""

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
_BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

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
            return f"{start}No record yet: `{spec['command']}`.\n{end}"
        lines, note = [*_table(spec, _records(spec, file))], ""
        if file not in seen:
            note = f"\n{_note(read_records(file)[0], os.path.relpath(file, page.parent))}\n"
            seen.add(file)
        return start + "".join(f"{line}\n" for line in lines) + note + end

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
    """The lines of a table: a row of the page has `across` records side by side."""
    columns = [x if isinstance(x, list) else [x, x] for x in spec["columns"]]
    across = spec.get("across", 1)
    size = -(-len(records) // across)
    head = [spec.get("first", ""), *(heading for heading, _ in columns)] * across
    yield _line(head)
    yield _line(["---"] * len(head)).replace(" ", "")
    for index in range(size):
        cells = []
        for record in records[index::size]:
            cells += [record["row"], *(_cell(spec, record, field) for _, field in columns)]
        yield _line(cells)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _cell(spec: Spec, record: Spec, field: str) -> str:
    """The value of a field, or of several in braces."""
    if "{" in field:
        return re.sub(r"{(.*?)}", lambda name: _cell(spec, record, name[1]), field)
    return _text(record.get(field), spec.get("number", ".3f"), spec.get("join", " ± "))


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
    for record in _records(spec, folder / f"{spec['records']}.jsonl"):
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
