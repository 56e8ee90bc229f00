"""Prints a script that completes commands, flags, recipes and tasks in a shell.

    source <(ttcd completion bash)      a line for ~/.bashrc
    source <(ttcd completion zsh)       for ~/.zshrc, after compinit if it is there

A path is completed by the shell.
"""

import re
from pathlib import Path

from ttcd_jax.commands import cli
from ttcd_jax.commands.main import COMMANDS
from ttcd_jax.commands.recipes import recipes
from ttcd_jax.errors import UserError

_FOLDER = Path(__file__).parent
# bash replaces what follows the last "=" of a word, zsh the word.
_SCRIPTS = {
    "bash": """_ttcd() {
  local IFS=$'\\n'
  COMPREPLY=($(ttcd completion bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
  [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o default -F _ttcd ttcd
""",
    "zsh": """_ttcd() {
  local -a found
  found=(${(f)"$(ttcd completion zsh "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"})
  compadd -S '' -- ${(M)found:#*=}
  compadd -- ${found:#*=}
  (( $#found )) || { compset -P 1 '*='; _files }
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _ttcd ttcd
""",
}


def main(argv: list[str]) -> None:
    shell, *line = argv[1:] or [""]
    if shell not in _SCRIPTS:
        raise UserError(f"completion of {' or '.join(_SCRIPTS)}, got {shell!r}")
    if not line:
        print(_SCRIPTS[shell], end="")
        return
    words = line[0].split()[1:] + [""] * line[0].endswith(" ") or [""]
    last = words[-1].partition("=")[0] + "=" if shell == "bash" and "=" in words[-1] else ""
    print("\n".join(word.removeprefix(last) for word in candidates(words)))


def candidates(words: list[str]) -> list[str]:
    """What the last of the words after `ttcd` may become."""
    command, last = words[0], words[-1]
    launched, studied = (recipes(cli.CONFIG_DIR, kind) for kind in ("launch", "study"))
    if len(words) == 1:
        found = [*COMMANDS, "--help", "--version"]
    elif last.startswith("--gin="):
        found = [f"--gin={name}" for name in (studied if command == "study" else launched)]
    elif last.startswith("--task="):
        sources = sorted((_FOLDER.parent / "tasks").rglob("*.py"))
        texts = "".join(path.read_text(encoding="utf-8") for path in sources)
        found = [f"--task={name}" for name in re.findall(r'(?m)^    name = "(\w+)"$', texts)]
    elif last.startswith("-") and command in COMMANDS:
        found = _flags(command)
    else:
        values = {"convert": ("import", "export"), "completion": _SCRIPTS}
        found = values.get(command, {**launched, **studied} if command == "show" else ())
    return [word for word in found if word.startswith(last)]


def _flags(command: str) -> list[str]:
    """The flags that the module of a command defines, read and not imported."""
    path = _FOLDER / COMMANDS[command][0]
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    found = re.findall(r'DEFINE_(\w+)\(\s*"(\w+)"', text)
    found += [("string", "distributed")] * ("define_distributed()" in text)
    return [f"--{name}{'=' * (kind != 'bool')}" for kind, name in found] + ["--import=", "--help"]


if __name__ == "__main__":
    cli.run(main, None)
