"""The output of commands: tables of aligned columns, for pages the text of every cell, and files of
JSON."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

type Row = Mapping[str, Any]


def write_json(value: Any, file: Path | None) -> None:
    """Whole or not at all, since who writes may be killed; nothing without a file."""
    if file is not None:
        part = file.with_name(f".{file.name}.{os.getpid()}")
        part.write_text(json.dumps(value, indent=1) + "\n")
        part.replace(file)


def format_table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Plain text for a terminal: a header, a rule, a line per row; numbers are right-aligned."""
    header, body = cells(rows, columns)
    names = [name for name, _ in header]
    widths = [max(map(len, column)) for column in zip(names, *body, strict=True)]
    signs = [">" if is_numeric else "<" for _, is_numeric in header]
    lines = names, ["-" * width for width in widths], *body
    texts = ("  ".join(map("{:{}{}}".format, line, signs, widths)) for line in lines)
    return "\n".join(map(str.rstrip, texts))


def cells(
    rows: Sequence[Row], columns: Sequence[str] | None = None
) -> tuple[list[tuple[str, bool]], list[list[str]]]:
    """(name, is_numeric) per column, all of them by default, and the text of every cell."""
    names = list(dict.fromkeys(x for row in rows for x in row)) if columns is None else columns
    header = [(_cell(name), all(_is_number(row.get(name)) for row in rows)) for name in names]
    return header, [[_cell(row.get(name)) for name in names] for row in rows]


def _is_number(value: Any) -> bool:
    if isinstance(value, str):  # with an interval, or a unit of bytes
        return re.fullmatch(r"[+-]?[\d.,e+-]+( ± .*| \(.*\)| [KMGT]?i?B)", value) is not None
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        # Four significant digits, zeros included, so that columns line up.
        return f"{value:,.0f}" if 10_000 <= abs(value) < 1e12 else f"{value:#.4g}".rstrip(".")
    # A control character in a name could rewrite the terminal or break the table.
    return "".join(letter if letter.isprintable() else "�" for letter in str(value))
