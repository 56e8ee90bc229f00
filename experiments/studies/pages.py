"""Draws the measured tables and pictures of the pages from the files in experiments/records.

    python -m experiments.pages

The first line of such a file has what holds for all others (command, commit, device, seeds, tokens,
what an interval is over), every other one is a measured row, named `row`. A table stands between
`<!-- table: NAME -->`, at the end of a paragraph, and `<!-- end -->`; `pages.toml` has its spec.
A table may join the rows of several files.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from ttcd_jax.commands import cli
from ttcd_jax.errors import DataError
from ttcd_jax.files import parse_json, write_whole
from ttcd_jax.measure.pictures import plot_lines

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "experiments/records"
PAGES = [
    *(ROOT / x for x in ("README.md", "experiments/RESULTS.md", "examples/model/README.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
_BLOCK = re.compile(r"(<!-- table: (\S+) -->)\n.*?(<!-- end -->)", re.DOTALL)
_FIELD = re.compile(r"{(.*?)(?::([.,].*?))?}")

type Spec = dict[str, Any]


def main(argv: list[str]) -> None:
    for page in PAGES:
        write_whole(page, drawn(page))
    for name, spec in specs()["picture"].items():
        draw(spec, ROOT / "docs" / f"{name}.svg")


def specs(folder: Path = RECORDS) -> Spec:
    """The tables and pictures by name."""
    return tomllib.loads((folder / "pages.toml").read_text(encoding="utf-8"))


def drawn(page: Path, folder: Path = RECORDS) -> str:
    """The text of a page with its tables as the records have them, the first of a file with a note
    of how they were measured. Raises `DataError` for a table or row that there is not."""
    tables, seen = specs(folder)["table"], set[Path]()

    def block(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if (spec := tables.get(name)) is None:
            raise DataError(f"{page} has a table {name} that pages.toml lacks: name it there")
        if "of" in spec:
            rows = [_joined(folder, *x) for x in spec["of"].items()]
            return f"{start}\n\n{_table(spec, rows)}\n{end}"
        file = folder / f"{spec.get('records', name)}.jsonl"
        if "command" in spec and not file.exists():
            return f"{start}\n\nNo record yet: `{spec['command']}`. {end}"
        head, records = _read(file, spec)
        parts = [part for record in records for part in _parts(spec, record)]
        text = f"{start}\n\n{_table(spec, parts, _fewer_seeds(file))}\n"
        if file not in seen and spec.get("note", True):
            seen.add(file)
            text += f"\n{_note(head, os.path.relpath(file, page.parent))} "
        return text + end

    return _BLOCK.sub(block, page.read_text(encoding="utf-8"))


def _read(file: Path, spec: Spec) -> tuple[Spec, list[Spec]]:
    """The first line of a file, and the rows that have the fields `where`, each with its value or
    one of a list: all, or `rows`, which `sections` joins from several."""
    head, *rows = [parse_json(line, file) for line in file.read_bytes().splitlines()]
    if "sections" in spec:
        joined = (_of_sections(name, spec["sections"], rows) for name in spec["rows"])
        rows = [row for row in joined if len(row) > 1]
    for name, value in spec.get("where", {}).items():
        rows = [x for x in rows if x.get(name) in (value if isinstance(value, list) else [value])]
    names = spec.get("rows", dict.fromkeys(x["row"] for x in rows))
    if missing := {*names} - {x["row"] for x in rows}:
        raise DataError(f"{file} has no row {', '.join(sorted(missing))}: mend pages.toml")
    return head, [row for name in names for row in rows if row["row"] == name]


def _of_sections(name: str, sections: dict[str, str], rows: list[Spec]) -> Spec:
    """The fields of a recipe in each section, each after the section's short name: of its first row
    there, which begins with its name, or of the columns NAME: FIELD."""
    found = {"row": name}
    for part, section in sections.items():
        of = [x for x in rows if x["section"] == section]
        own = [x for x in of if str(x["row"]).partition(", ")[0] == name]
        own += [y for x in of for y in _parts({"parts": [name]}, x)]
        for row in own[:1]:
            found |= {f"{part} {field}": x for field, x in row.items() if field != "row"}
    return found


def _fewer_seeds(file: Path) -> dict[str, list[int]]:
    """The recipes that were trained with some of the study's seeds alone, and these."""
    head, *rows = [parse_json(line, file) for line in file.read_bytes().splitlines()]
    trained: dict[str, list[int]] = {}
    for row in rows:
        if seeds := [x for x in head.get("seeds", ()) if row.get(f"seed {x}") is not None]:
            trained[row["row"].partition(", ")[0]] = seeds
    return {x: y for x, y in trained.items() if len(y) < len(head["seeds"])}


def _joined(folder: Path, name: str, parts: dict[str, Spec]) -> Spec:
    """A row of the fields of rows of several files, the name of a field after that of its part: a
    file, or what has the file as `records`."""
    row = {"row": name}
    for part, fields in parts.items():
        file, where = fields.get("records", part), {x: fields[x] for x in fields if x != "records"}
        [record] = _read(folder / f"{file}.jsonl", {"where": where, "rows": [fields["row"]]})[1]
        row |= {f"{part} {field}": value for field, value in record.items()}
    return row


def _parts(spec: Spec, record: Spec) -> list[Spec]:
    """A record, or by `parts` a row for every name, of the fields NAME: FIELD."""
    if not (names := spec.get("parts")):
        return [record]
    split = [(*field.rpartition(": ")[::2], value) for field, value in record.items()]
    return [{"row": x} | {field: value for name, field, value in split if name == x} for x in names]


def _table(spec: Spec, records: list[Spec], fewer: dict[str, list[int]] | None = None) -> str:
    """`fewer`: rows of some of the seeds, named where no column is of one seed."""
    columns = [(x, x) if isinstance(x, str) else x for x in spec["columns"]]
    if any("seed" in x for column in columns for x in column):
        fewer = None
    lines = [[spec.get("first", ""), *(heading for heading, *_ in columns)]]
    names = spec.get("names", {})
    for record in records:
        cells = (_cell(spec, record, *x[1:]) for x in columns)
        seeds = (fewer or {}).get(record["row"].partition(", ")[0])
        of_seeds = f" (seed {', '.join(map(str, seeds))})" if seeds else ""
        lines.append([names.get(record["row"], record["row"]) + of_seeds, *cells])
    head, *body = ["| " + " | ".join(x.replace("|", "\\|") for x in line) + " |" for line in lines]
    return "\n".join((head, f"|{'---|' * len(lines[0])}", *body))


def _cell(spec: Spec, record: Spec, field: str, join: str = "") -> str:
    """The text of a field, or of the {NAME} and {NAME:FORMAT} in a text."""
    join = join or spec.get("join", " ± ")

    def text(value: Any, number: str) -> str:
        if isinstance(value, list):
            return join.join(text(x, number) for x in value)
        if isinstance(value, float | int):
            return f"{value:{number if isinstance(value, float) else ','}}"
        return "-" if value is None else value

    in_braces, number = field if "{" in field else f"{{{field}}}", spec.get("number", ".3f")
    return _FIELD.sub(lambda x: text(record.get(x[1]), x[2] or number), in_braces)


def _note(head: Spec, link: str) -> str:
    seeds = "seed " + ", ".join(map(str, head["seeds"])) if "seeds" in head else None
    over = f"± is half of a 95 % interval over {head['interval']}" if "interval" in head else None
    record = f"[record]({link})" + (f", from the {head['source']}" if "source" in head else "")
    facts = head.get("on"), head.get("tokens"), seeds, head["device"], f"commit {head['commit']}"
    return f"`{head['command']}`: {'; '.join(filter(None, (*facts, over, record)))}."


def draw(spec: Spec, path: Path) -> None:
    """A picture with a line per record at the fields `x`, and its intervals."""
    series, bands = {}, {}
    for record in _read(RECORDS / f"{path.stem}.jsonl", spec)[1]:
        found = (record[name] for name in spec["x"])
        means, halves = np.array([x if isinstance(x, list) else (x, 0) for x in found]).T
        name = spec.get("names", {}).get(record["row"], record["row"])
        series[name] = spec["x"], means.tolist()
        bands[name] = [(means + sign * halves).tolist() for sign in (-1, 1)]
    labels = {name: spec[name] for name in ("title", "x_label", "y_label")}
    plot_lines(path, series=series, bands=bands, **labels)


if __name__ == "__main__":
    cli.run(main)
