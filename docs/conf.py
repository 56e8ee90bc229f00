"""The site that `make docs` builds, from the pages, the docstrings and the commands.

A page has `<!-- fields: PREFIX -->`, `<!-- api: MODULE -->` or `<!-- commands: -->` where the
configuration classes of modules, the public names of a module or the flags of commands stand on the
site. Docstrings are Markdown with indented equations; autodoc gets them as reStructuredText.
"""

import dataclasses
import importlib
import inspect
import re
import typing
from pathlib import Path
from typing import Any, get_args

from absl import flags
from flax import nnx
from pygments.lexers.python import PythonLexer
from sphinx.application import Sphinx

from experiments.studies.mad.sweep import MADSweepConfig
from ttcd_jax.commands.main import COMMANDS
from ttcd_jax.commands.study.runs import StudyConfig
from ttcd_jax.config import Bound, Config, describe
from ttcd_jax.run.bindings import reachable_classes
from ttcd_jax.run.config import RunConfig

project = "ttcd_jax"
project_copyright = "The ttcd_jax maintainers"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
# The source is the repository, so that a link between any two pages works here and on GitHub.
root_doc = "docs/index"
include_patterns = [
    *("*.md", "docs/**.md", "experiments/RESULTS.md", "kernels/README.md"),
    "tests/golden/README.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "examples", "ttcd_jax", "**/__pycache__"]
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures; links between pages are checked
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_merge_streams = True
nb_execution_raise_on_error = True
html_theme = "furo"
html_title = "ttcd_jax"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = False
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "config_class"}
maximum_signature_line_length = 80
smartquotes = False

ROOTS = (RunConfig, StudyConfig, MADSweepConfig)
CLASSES = {name: cls for root in ROOTS for name, cls in reachable_classes(root).items()}


def fields(prefix: str) -> str:
    """The configuration classes of the modules whose names begin so, a regular expression."""
    found = [(name, x) for name, x in CLASSES.items() if re.match(prefix, x.__module__)]
    return "\n".join(
        f"### {name}\n\n{_documented('autoclass', f'{cls.__module__}.{name}')}"
        for name, cls in sorted(found)
    )


def api(module: str) -> str:
    """The public names of a module but its configurations, whose fields have pages of their own."""
    names, text = dir(found := importlib.import_module(module)), []
    for name in getattr(found, "__all__", [x for x in names if x[0] not in "_" and x != "axes"]):
        value = getattr(found, name)
        if inspect.ismodule(value) or value in (*CLASSES.values(),) or not callable(value):
            continue
        kind = "autoclass" if isinstance(value, type) else "autofunction"
        is_config = kind == "autoclass" and issubclass(value, Config)
        members = "" if kind == "autofunction" or is_config else "   :members:\n"
        text.append(f"### {name}\n\n" + _documented(kind, f"{module}.{name}", members))
    return "\n".join(text)


def commands(_: str) -> str:
    """The help of every command of `ttcd`, and its flags."""
    text = []
    for command, (module, before, words) in COMMANDS.items():
        name = f"ttcd_jax.commands.{module}"
        text.append(f"## ttcd {command}")
        if before:
            text.append(f"It is `ttcd {module} {' '.join(before)}`: {words}.")
            continue
        paragraphs = _help(name).split("\n\n")
        text += [x if x.startswith("    ") else _escaped(x) for x in paragraphs]
        if found := _flags(name):
            rows = [f"| `--{x.name}` | {_default(x)} | {_said(x)} |" for x in found]
            text.append("\n".join(["| flag | default | |", "|---|---|---|", *rows]))
    return "\n\n".join(text)


def _documented(directive: str, name: str, options: str = "") -> str:
    return f"```{{eval-rst}}\n.. {directive}:: {name}\n{options}```\n"


def _help(module: str) -> str:
    """The docstring of a command, which is not imported."""
    path = Path(importlib.util.find_spec(module).origin)
    path = path.with_name("__main__.py") if path.name == "__init__.py" else path
    return path.read_text().split('"""')[1].strip()


def _flags(module: str) -> list[flags.Flag]:
    """The flags that a command defines; two commands may define the same, each its own."""
    before = {*flags.FLAGS}
    if importlib.util.find_spec(module).submodule_search_locations:
        module += ".__main__"
    if module.endswith(".harness"):  # the harness' own
        return []
    importlib.import_module(module)
    found = [flags.FLAGS[name] for name in [*flags.FLAGS] if name not in before]
    for flag in found:
        delattr(flags.FLAGS, flag.name)
    return found


def _default(flag: flags.Flag) -> str:
    if flag.default is None and flag.validators:
        return "required"
    return "-" if flag.default in (None, "", []) else f"`{flag.default}`"


def _said(flag: flags.Flag) -> str:
    text = re.split(r";\s+repeat this option", flag.help)[0]
    is_repeated = isinstance(flag, flags.MultiFlag)
    return " ".join(_escaped(text).split()) + " May be repeated." * is_repeated


def _escaped(text: str) -> str:
    """Text of a docstring as Markdown."""
    return re.sub(r"([|<*_\[\]])", r"\\\1", text)


def _generated(app: Sphinx, page: str, source: list[str]) -> None:
    makers = {"fields": fields, "api": api, "commands": commands}
    pattern = rf"<!-- ({'|'.join(makers)}): ?(\S*) -->"
    source[0] = re.sub(pattern, lambda match: makers[match[1]](match[2]), source[0])


def _signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Types as a reader knows them; the fields of a configuration are in a table."""
    if isinstance(value, type) and issubclass(value, Config):
        return "", ""
    if isinstance(value, type) and issubclass(value, nnx.Module):
        value = value.__init__
    if not inspect.isfunction(value):
        return None
    hints = typing.get_type_hints(value, include_extras=True)
    parameters = []
    for x in inspect.signature(value).parameters.values():
        hint = hints.get(x.name, Any)
        if typing.get_origin(hint) is typing.Unpack:  # of a TypedDict
            [kinds] = get_args(hint)
            for name, kind in typing.get_type_hints(kinds).items():
                default = x.empty if name in kinds.__required_keys__ else _Text("...")
                given = {"default": default, "annotation": _shown(kind)}
                parameters.append(inspect.Parameter(name, x.KEYWORD_ONLY, **given))
        elif x.name not in ("self", "cls"):
            parameters.append(x.replace(annotation=_shown(hint)))
    returns = "" if value.__name__ == "__init__" else _shown(hints.get("return", Any))
    return str(inspect.Signature(parameters)), returns


class _Text(str):
    """What a signature shows as it is."""

    __repr__ = str.__str__


def _shown(hint: Any) -> _Text:
    """A type without the names of modules."""
    return _Text(re.sub(r"\b(?:\w+\.)+(?=[A-Za-z])", "", describe(hint)))


def _skipped(
    app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """The fields of a NamedTuple, which its signature has."""
    return True if type(value).__name__ == "_tuplegetter" else None


def _docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Markdown to reStructuredText, in place; then the fields of a configuration."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip())
    lines[:] = "\n\n".join(map(_restructured, paragraphs)).splitlines()
    if isinstance(value, type) and issubclass(value, Config):
        lines += ["", ".. list-table::", "   :header-rows: 1", ""]
        lines += _row("field", "type", "default")
        hints = typing.get_type_hints(value, include_extras=True)
        for field in dataclasses.fields(value):
            is_required = field.default is dataclasses.MISSING
            default = "required" if is_required else f"``{field.default!r}``"
            bounds = _restructured(", ".join(dict.fromkeys(_bounds(hints[field.name]))))
            kind = f"``{_shown(hints[field.name])}``" + f", {bounds}" * bool(bounds)
            lines += _row(f"``{field.name}``", kind, default)
    lines.append("")


def _restructured(paragraph: str) -> str:
    if paragraph.startswith("    "):
        return "::\n\n" + paragraph
    parts = paragraph.split("`")
    parts[::2] = [re.sub(r"([*|_\\])", r"\\\1", part) for part in parts[::2]]
    return "``".join(parts)


def _row(first: str, *rest: str) -> list[str]:
    return [f"   * - {first}", *(f"     - {cell}" for cell in rest)]


def _bounds(hint: Any) -> list[str]:
    own = [x.wording for x in getattr(hint, "__metadata__", ()) if isinstance(x, Bound)]
    return own + [text for part in get_args(hint) for text in _bounds(part)]


def _entrance(app: Sphinx, error: Exception | None) -> None:
    """The first page of the site, at its root."""
    page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
    (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Sphinx) -> None:
    app.add_lexer("gin", PythonLexer)
    app.connect("source-read", _generated)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-skip-member", _skipped)
    app.connect("build-finished", _entrance)
