"""Lists the recipes, or those whose name or header has all words of a search.

    ttcd recipes [WORD ...]

Each is a file of configurations that `ttcd launch --gin=NAME` trains, or of several that
`ttcd study --gin=NAME` compares; its first line says what it is, the other ones what it costs.
"""

import re
from pathlib import Path

from ttcd_jax.commands import cli
from ttcd_jax.errors import UserError


def main(argv: list[str]) -> None:
    found = {
        f"ttcd {command} --gin={name}": header.partition("\n")[0]
        for command in ("launch", "study")
        for name, header in recipes(cli.CONFIG_DIR, command).items()
        if all(word.lower() in f"{name} {header}".lower() for word in argv[1:])
    }
    if not found:
        raise UserError(f"no recipe has all of the words {' '.join(argv[1:])}: give fewer")
    width = max(map(len, found))
    print("\n".join(f"{line:<{width}}  {title}" for line, title in found.items()))


def recipes(folder: Path, command: str) -> dict[str, str]:
    """By name the headers of files that such a command reads."""
    found = {}
    for path in sorted(folder.rglob("*.gin"), key=lambda x: (len(x.parts), x)):
        text = path.read_text(encoding="utf-8")
        header = "\n".join(re.findall(r"(?m)^# ?(.*)", text))
        if f"experiments.{command} " in header:
            found[path.relative_to(folder).as_posix()] = header
    return found


if __name__ == "__main__":
    cli.run(main, None)
