"""The bindings of a .gin file, each with its location.

gin's parser reads the language. Nothing of gin's runtime is used: a file cannot import or call
anything, so an untrusted one is safe to read.
"""

import difflib
import os
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

from ttcd_jax.errors import UserError

Key = tuple[str, str, str]

_MAX_BYTES = 2**20  # of a file


class Reference(NamedTuple):
    """`@scope/Name()`; without the parentheses `is_called` is False."""

    scope: str
    name: str
    is_called: bool


class Macro(NamedTuple):
    """`%name`."""

    name: str


class Binding(NamedTuple):
    """`scope/owner.field = value` at the location `where`. A macro's definition has no field."""

    scope: str
    owner: str
    field: str
    value: Any
    where: str

    @property
    def key(self) -> Key:
        return self.scope, self.owner, self.field

    @property
    def name(self) -> str:
        path = f"{self.scope}/{self.owner}" if self.scope else self.owner
        return f"{path}.{self.field}" if self.field else path


class _Delegate(config_parser.ParserDelegate):
    """Keeps references and macros as plain values, without a lookup."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(scope, name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def mentions(value: Any) -> Iterator[Reference | Macro]:
    """The references and macros inside a bound value."""
    if isinstance(value, Reference | Macro):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from mentions(item)


def find_gin_file(gin_file: str, config_dir: Path) -> Path:
    """The file of `--gin`: a name inside `config_dir`, or a path. Raises `UserError`."""
    for path in (config_dir / gin_file, Path(gin_file)):
        # Path.is_file would raise for a name that is too long or holds a null character.
        if os.path.isfile(path):
            return path
    raise UserError(f"no file {gin_file!r} in {config_dir}{_nearest_files(gin_file, config_dir)}")


def read_file(path: Path, config_dir: Path) -> dict[Key, Binding]:
    """The bindings of a file and of the fragments it includes, whose bindings it may override.

    Raises `UserError` with file:line for bad syntax, an import, an include that leaves
    `config_dir`, is missing, late or circular, and a key bound twice by one file or two fragments.
    """
    return _read(path.resolve(), config_dir.resolve(), ())


def read_params(params: Sequence[str], config_dir: Path) -> dict[Key, Binding]:
    """The bindings of the command line and of the fragments it includes; the last of a key wins."""
    bindings: dict[Key, Binding] = {}
    for param in params:
        where = f"--param {param}"
        for statement, _ in _parse(param, lambda _, where=where: where):
            if isinstance(statement, config_parser.IncludeStatement):
                places = config_dir.resolve(), Path.cwd()
                bindings |= read_file(_fragment(statement.filename, where, places), config_dir)
            else:
                binding = _binding(statement, where)
                bindings[binding.key] = binding
    return bindings


def _read(path: Path, config_dir: Path, parents: tuple[Path, ...]) -> dict[Key, Binding]:
    shown = path.relative_to(config_dir) if path.is_relative_to(config_dir) else path
    if path in parents:
        raise UserError(f"{shown} includes itself through {parents[-1].name}")
    included: dict[Key, Binding] = {}
    own: dict[Key, Binding] = {}
    conflicts: dict[Key, str] = {}
    for statement, where in _parse(_text(path), lambda line: f"{shown}:{line}"):
        if isinstance(statement, config_parser.IncludeStatement):
            if own:
                raise UserError(f"{where}: includes come before the bindings that override them")
            fragment = _fragment(statement.filename, where, (path.parent, config_dir))
            for key, binding in _read(fragment, config_dir, (*parents, path)).items():
                first = included.setdefault(key, binding).where
                if binding.where != first:
                    conflicts.setdefault(key, _bound_twice(binding, first))
            continue
        binding = _binding(statement, where)
        if binding.key in own:
            raise UserError(_bound_twice(binding, own[binding.key].where))
        own[binding.key] = binding
    for key, message in conflicts.items():
        if key not in own:
            raise UserError(f"{message}, or bind it in the including file")
    return included | own


def _bound_twice(binding: Binding, first: str) -> str:
    return f"{binding.where}: {binding.name} is already bound at {first}; keep one"


def _binding(statement: config_parser.BindingStatement, where: str) -> Binding:
    scope, owner, field, value, _ = statement
    if not field:
        scope, owner = "", "/".join(filter(None, (scope, owner)))
    return Binding(scope, owner, field, value, where)


def _parse(text: str, locate: Callable[[int], str]) -> list[tuple[Any, str]]:
    """gin's includes and bindings, each with its location. Raises `UserError` for an import."""
    try:
        statements = list(config_parser.ConfigParser(text, _Delegate()))
    except SyntaxError as error:
        message, line = str(error.msg), error.lineno or 1
    except tokenize.TokenError as error:
        message, (line, _) = error.args
    else:
        located = [
            (statement, locate(statement.location.line_num))
            for statement in statements
            if not isinstance(statement, config_parser.BlockDeclaration)
        ]
        for statement, where in located:
            if isinstance(statement, config_parser.ImportStatement):
                raise UserError(
                    f"{where}: a configuration may not import {statement.module!r}, only bind "
                    "values (Class.field=value)"
                )
        return located
    _, failed, token = message.partition("Failed to parse token ")
    if failed:
        message = f"cannot read the value {token}; a string needs quotes"
        if (name := token.strip("'"))[:1].isupper() and f"{name}(" in text:
            message = f"write @{name}() for {name}(...), and each field as {name}.field = value"
    raise UserError(f"{locate(line)}: {' '.join(message.split())}")


def _text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UserError(f"{path} has {size} bytes, a configuration at most {_MAX_BYTES}")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _fragment(name: str, where: str, folders: Sequence[Path]) -> Path:
    """The file of an include, in the first of `folders` that has it."""
    folder = next((folder for folder in folders if os.path.isfile(folder / name)), None)
    if folder is None:
        places = " or ".join(dict.fromkeys(map(str, folders)))
        near = "".join(_nearest_files(name, folder) for folder in dict.fromkeys(folders))
        raise UserError(f"{where}: no file {name!r} to include in {places}{near}")
    path = (folder / name).resolve()
    if os.path.isabs(name) or not path.is_relative_to(folder):
        raise UserError(f"{where}: include {name!r} leaves {folder}; name a file below it")
    return path


def _nearest_files(name: str, config_dir: Path) -> str:
    known = {
        key: str(path.relative_to(config_dir))
        for path in sorted(config_dir.rglob("*.gin"))
        for key in (path.name, str(path.relative_to(config_dir)))
    }
    near = [known[key] for key in difflib.get_close_matches(name, known, n=3, cutoff=0.65)]
    return f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
