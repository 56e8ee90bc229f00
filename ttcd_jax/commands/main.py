"""`ttcd COMMAND ...`, or `python -m ttcd_jax COMMAND ...`: runs the module of a command."""

import importlib.metadata
import os
import runpy
import sys

from ttcd_jax.commands import cli
from ttcd_jax.config import closest
from ttcd_jax.errors import UserError

# By command: its module, what is put before its arguments, what it does.
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "launch": ("launch", (), "train a model by a recipe; the same command resumes the run"),
    "plan": ("launch", ("--dry_run",), "parameters, bytes, FLOPs and time of a run, before it"),
    "evaluate": ("evaluate", (), "measure a run: perplexity, RULER, needles and other tasks"),
    "inspect": ("inspect_text", (), "look at the memories of a run while it reads a text"),
    "report": ("report", (), "one HTML page of several runs, and their tables"),
    "generate": ("generate", (), "text after prompts, answers to messages"),
    "convert": ("convert", (), "import and export: Hugging Face, GGUF, the authors' checkpoints"),
    "prepare": ("prepare_data", (), "token records from raw text"),
    "study": ("study", (), "train and compare several recipes with several seeds"),
    "lm_eval": ("harness", (), "lm-evaluation-harness with runs as models"),
    "recipes": ("recipes", (), "list the recipes, or those with all words of a search"),
    "show": ("show", (), "the configuration of a recipe, whole, and the file of each value"),
    "completion": ("completion", (), "print a script that completes these commands in a shell"),
}


def main() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        cli.open_standard_streams()
        with cli.mistakes_reported():
            print(_answer(name))
        return
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for --import=my_module
    module, before, _ = COMMANDS[name]
    sys.argv[1:] = [*before, *rest]
    runpy.run_module(f"ttcd_jax.commands.{module}", run_name="__main__", alter_sys=True)


def _answer(name: str) -> str:
    """What `ttcd` says itself. Raises `UserError` for another word."""
    if name in ("--help", "-h", "help"):
        lines = [f"  {command:<11} {text}" for command, (_, _, text) in COMMANDS.items()]
        return "\n".join(["ttcd COMMAND ...\n", *lines, "\nttcd COMMAND --help: its flags"])
    if name == "--version":
        return f"ttcd {importlib.metadata.version('ttcd-jax')}"
    near = closest(name, [*COMMANDS]) or f"; there are {', '.join(COMMANDS)}"
    raise UserError(f"ttcd has no command {name!r}{near}")


if __name__ == "__main__":
    main()
