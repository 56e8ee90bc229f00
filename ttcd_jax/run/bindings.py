"""One frozen configuration tree from the bindings of a .gin file and of `--param`.

Every dataclass that the root's type hints reach is known by its class name:

    include 'model/tiny.gin'              fragments first: beside this file, else among the recipes
    SEQ_LEN = 256                         a macro
    RunConfig.seq_len = %SEQ_LEN
    RunConfig.data = @RecallConfig()      the class that fills a field
    RunConfig.teacher = @teacher/AttentionConfig()
    teacher/AttentionConfig.window = 64   applies inside that scope only

A field that can hold exactly one class and has no default is built without a binding. gin parses;
every binding is checked before a class is called, so that a file cannot import or call anything
else, and every mistake has its file and line.
"""

import dataclasses
import difflib
import itertools
import os
import tokenize
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config_parser

from ttcd_jax.config import Config, closest, config_classes, required_fields
from ttcd_jax.errors import UserError
from ttcd_jax.registry import OF_YOUR_OWN

Classes = dict[str, type[Config]]
# (required field without a binding, the bound values of others) -> a configuration to inherit, in
# which single bindings replace fields; None to build one from the class's defaults.
Inherit = Callable[[str, dict[str, Any]], Config | None]

_MAX_BYTES = 2**20  # of a file


class Reference(NamedTuple):
    """`%name`, or `@scope/name()`, without its parentheses not `is_called`."""

    scope: str
    name: str
    is_macro: bool
    is_called: bool = True


class _References(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(scope, name, is_macro=False, is_called=evaluate)

    def macro(self, macro_name: str) -> Reference:
        return Reference("", macro_name, is_macro=True)


class Binding(NamedTuple):
    """`scope/owner.field = value` at the location `where`. A macro's definition has no field."""

    scope: str
    owner: str
    field: str
    value: Any
    where: str

    @property
    def name(self) -> str:
        return f"{self.scope}/{self.owner}.{self.field}".strip("/.")


Bindings = dict[tuple[str, str, str], Binding]  # by scope, owner and field


def load_config[C: Config](
    root: type[C],
    gin_file: str,
    params: Sequence[str] = (),
    *,
    config_dir: Path,
    inherit: Inherit = lambda field, values: None,
) -> C:
    """The tree of configurations of `gin_file`, a name inside `config_dir` or a path; `params`
    override its bindings.

    Raises `UserError`, with file:line where there is one, for an unknown name, a binding or macro
    without effect, a missing or a wrong value. Only a parameter that swaps a class may leave the
    file's bindings without effect.
    """
    bindings = read_file(find_gin_file(gin_file, config_dir), config_dir)
    return _Builder(root, bindings, read_params(params, config_dir), inherit).build()


def rebound[C: Config](config: C, params: Sequence[str]) -> C:
    """`config` with the bindings `params` in every configuration of their class inside it. Raises
    `UserError` as `load_config`."""
    return _Builder(type(config), {}, read_params(params, Path.cwd())).build(config)


def reachable_classes(root: type[Config]) -> Classes:
    """`root` and every configuration class that its fields' hints reach, by class name."""
    classes: Classes = {}
    pending = [root]
    while pending:
        cls = pending.pop(0)
        if cls.__name__ not in classes:
            classes[cls.__name__] = cls
            for hint in typing.get_type_hints(cls).values():
                pending += config_classes(hint)
        if classes[cls.__name__] is not cls:
            raise UserError(f"two configuration classes are called {cls.__name__}: rename yours")
    return classes


class _Builder:
    """Builds a root with `bindings | overrides`, checked by name."""

    def __init__(
        self,
        root: type[Config],
        bindings: Bindings,
        overrides: Bindings,
        inherit: Inherit = lambda field, values: None,
    ) -> None:
        self._root, self._inherit, self._classes = root, inherit, reachable_classes(root)
        self._replaced = [bindings[key] for key in overrides if key in bindings]
        self._bindings = bindings | overrides
        self._used: set[tuple[str, str, str]] = set()
        self._open: list[tuple[Binding, str]] = []  # whose values are being made, and their scopes
        _check_names([*self._replaced, *self._bindings.values()], self._classes)

    def build(self, base: Config | None = None) -> Any:
        """The root, its fields without a binding those of `base`, if given."""
        config = self._made(self._root, "", base)
        self._check_use()
        return config

    def _made(self, cls: type[Config], scope: str, base: Config | None = None) -> Config:
        names, hints = [x.name for x in dataclasses.fields(cls)], typing.get_type_hints(cls)
        bound = {x: y for x in names if (y := self._found(cls.__name__, x, scope))}
        values = {name: self._value(binding, scope) for name, binding in bound.items()}
        needed = required_fields(cls) if base is None else ()
        for name in (x for x in names if x not in bound):
            if base is not None:
                value = values[name] = getattr(base, name)
                if isinstance(value, Config):
                    values[name] = self._made(type(value), scope, value)
            elif name in needed and config_classes(hints[name]) == [hints[name]]:
                values[name] = self._made(hints[name], scope, self._inherit(name, values))
        if lacking := [x for x in needed if x not in values]:
            examples = (f"{cls.__name__}.{x} = {_example(hints[x])}" for x in lacking)
            raise UserError(f"{cls.__name__} lacks a value; bind {', '.join(examples)}")
        try:
            return cls(**values) if base is None else base.overridden(values, bound)
        except UserError as error:
            owner, _, name = str(error).partition(" ")[0].partition(".")
            if owner != cls.__name__ or name not in bound:
                raise
            raise type(error)(f"{bound[name].where}: {error}") from None

    def _found(self, owner: str, field: str, scope: str) -> Binding | None:
        """The binding that applies in a scope, the innermost; those of outer scopes that it
        overrides are used too."""
        scopes = itertools.accumulate(scope.split("/"), "{}/{}".format) if scope else ()
        keys = [(x, owner, field) for x in ("", *scopes)]
        found = [self._bindings[key] for key in keys if key in self._bindings]
        self._used.update(x[:3] for x in found)
        return found[-1] if found else None

    def _value(self, binding: Binding, scope: str) -> Any:
        """What is bound, with what its references stand for."""
        if (binding, scope) in self._open:
            around = self._open[self._open.index((binding, scope)) :]
            cycle = " -> ".join(x.owner for x, _ in [*around, around[0]])
            raise UserError(f"the configuration contains itself: {cycle}")

        def value(x: Any) -> Any:
            if isinstance(x, Reference):
                if x.is_macro:
                    return self._value(self._bindings["", x.name, ""], x.name)
                return self._made(self._classes[x.name], x.scope or scope)
            return tuple(map(value, x)) if isinstance(x, list | tuple) else x

        self._open.append((binding, scope))
        found = value(binding.value)
        self._open.pop()
        return found

    def _check_use(self) -> None:
        """Raises `UserError` for a binding without effect and an unused macro; those of the classes
        that the replaced bindings would have built are excused."""
        mentioned, excused = set(), set()
        for binding in [*self._replaced, *self._bindings.values()]:
            own = "" if binding.field else binding.owner
            mentioned |= {x.name for x in _references(binding.value) if x.is_macro} - {own}
        pending = [x for binding in self._replaced for x in _references(binding.value)]
        for reference in pending:  # grows
            if reference.is_macro:
                pending += _references(self._bindings["", reference.name, ""].value)
            else:
                excused |= reachable_classes(self._classes[reference.name]).keys()
        for key, binding in self._bindings.items():
            if not binding.field and binding.owner not in mentioned:
                near = closest(binding.owner, [*self._classes])
                near = near or ": where a field that read it is bound again, set it instead"
                raise UserError(f"{binding.where}: macro {binding.owner} is never used{near}")
            if binding.field and key not in self._used and binding.owner not in excused:
                raise UserError(_unused(binding, self._classes))


def _references(value: Any) -> Iterator[Reference]:
    """Those inside a bound value."""
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _references(item)


def _example(hint: Any) -> str:
    choices = " or ".join(f"@{cls.__name__}()" for cls in config_classes(hint))
    return choices or f"<{getattr(hint, '__name__', hint)}>"


def _check_names(bindings: Sequence[Binding], classes: Classes) -> None:
    """Raises `UserError` for an unknown class, field or macro."""
    macros = [binding.owner for binding in bindings if not binding.field]
    for _, owner, field, value, where in bindings:
        references = [*_references(value)]
        for name in [owner] * bool(field) + [x.name for x in references if not x.is_macro]:
            if name not in classes:
                near = closest(name, [*classes]) or f"; known are {', '.join(sorted(classes))}"
                raise UserError(f"{where}: no configuration class {name!r}{near} {OF_YOUR_OWN}")
        fields = [x.name for x in dataclasses.fields(classes[owner])] if field else [""]
        if field not in fields:
            near = closest(field, fields)
            if hasattr(classes[owner], field):
                near = ": annotate it there, under @dataclasses.dataclass"
            raise UserError(f"{where}: {owner} has no field {field!r}{near}")
        for name, is_macro, is_called in (x[1:] for x in references):
            if is_macro and name not in macros:
                raise UserError(f"{where}: no macro %{name} is defined{closest(name, macros)}")
            if not is_called:
                raise UserError(f"{where}: write @{name}(), with parentheses")


def _unused(binding: Binding, classes: Classes) -> str:
    target = f"@{binding.scope}/{binding.owner}()" if binding.scope else f"@{binding.owner}()"
    holders = [
        f"{cls.__name__}.{field} = {target}"
        for cls in classes.values()
        for field, hint in typing.get_type_hints(cls).items()
        if classes[binding.owner] in config_classes(hint)
    ]
    scope = f" in scope {binding.scope!r}" if binding.scope else ""
    return (
        f"{binding.where}: {binding.name} has no effect, no {binding.owner} is built{scope}; "
        f"remove it{' or bind ' * bool(holders)}{' or '.join(holders)}"
    )


def find_gin_file(gin_file: str, config_dir: Path) -> Path:
    """The file of `--gin`: a name inside `config_dir`, or a path. Raises `UserError`."""
    folders = (config_dir, *[Path()] * os.path.isfile(gin_file))
    return _first_with(gin_file, folders, f"no file {gin_file!r} in", is_run=True) / gin_file


def read_file(path: Path, config_dir: Path, parents: tuple[Path, ...] = ()) -> Bindings:
    """The bindings of a file and of the fragments it includes, whose bindings it may override;
    `parents` include it.

    Raises `UserError` with file:line for bad syntax, an import, an include that leaves
    `config_dir`, is missing, late or circular, and a key bound twice by one file or two fragments.
    """
    path, config_dir = path.resolve(), config_dir.resolve()
    shown = path.relative_to(config_dir) if path.is_relative_to(config_dir) else path
    if path in parents:
        raise UserError(f"{shown} includes itself through {parents[-1].name}")
    included: list[Binding] = []
    own: Bindings = {}
    for statement, where in _parse(_text(path), lambda line: f"{shown}:{line}"):
        if isinstance(statement, Binding):
            _add(own, statement, "keep one")
        elif own:
            raise UserError(f"{where}: includes come before the bindings that override them")
        else:
            fragment = _fragment(statement, where, (path.parent, config_dir))
            included += read_file(fragment, config_dir, (*parents, path)).values()
    bindings = dict(own)
    for binding in included:
        if binding[:3] not in own:
            _add(bindings, binding, "keep one, or bind it in the including file")
    return bindings


def read_params(params: Sequence[str], config_dir: Path) -> Bindings:
    """The bindings of the command line and of the fragments it includes; the last of a key wins."""
    bindings: Bindings = {}
    for param in params:
        for statement, where in _parse(param, lambda _, param=param: f"--param {param}"):
            if isinstance(statement, Binding):
                bindings[statement[:3]] = statement
            else:
                path = _fragment(statement, where, (config_dir.resolve(), Path.cwd()))
                bindings |= read_file(path, config_dir)
    return bindings


def _add(bindings: Bindings, binding: Binding, remedy: str) -> None:
    if (first := bindings.setdefault(binding[:3], binding)).where != binding.where:
        where = f"already bound at {first.where}"
        raise UserError(f"{binding.where}: {binding.name} is {where}; {remedy}")


def _parse(text: str, locate: Callable[[int], str]) -> list[tuple[Binding | str, str]]:
    """Bindings, and files to include, each with its location. `UserError` for an import."""
    try:
        statements = list(config_parser.ConfigParser(text, _References()))
    except SyntaxError as error:
        message, line = str(error.msg), error.lineno or 1
    except tokenize.TokenError as error:
        message, (line, _) = error.args
    except UnicodeEncodeError:
        message, line = "it is not UTF-8", 1
    else:
        statements = [x for x in statements if not isinstance(x, config_parser.BlockDeclaration)]
        places = [locate(statement.location.line_num) for statement in statements]
        return [(_statement(*pair), pair[1]) for pair in zip(statements, places, strict=True)]
    _, failed, token = message.partition("Failed to parse token ")
    if failed:
        message = f"cannot read the value {token}; a string needs quotes"
        if (name := token.strip("'"))[:1].isupper() and f"{name}(" in text:
            message = f"write @{name}() for {name}(...), and each field as {name}.field = value"
    raise UserError(f"{locate(line)}: {' '.join(message.split())}")


def _statement(statement: Any, where: str) -> Binding | str:
    if isinstance(statement, config_parser.IncludeStatement):
        return statement.filename
    if isinstance(statement, config_parser.ImportStatement):
        raise UserError(
            f"{where}: a configuration may not import {statement.module!r}, only bind values "
            "(Class.field=value)"
        )
    scope, owner, field, value, _ = statement
    if not field:
        scope, owner = "", f"{scope}/{owner}".strip("/")
    return Binding(scope, owner, field, value, where)


def _text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UserError(f"{path} has {size} bytes, a configuration at most {_MAX_BYTES}")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _first_with(name: str, folders: Sequence[Path], problem: str, is_run: bool = False) -> Path:
    """The first of `folders` that has such a file; without one a `UserError`."""
    for folder in folders:
        # Path.is_file would raise for a name that is too long or holds a null character.
        if os.path.isfile(folder / name):
            return folder
    near = "".join(_nearest_files(name, folder, is_run) for folder in folders)
    raise UserError(f"{problem} {' or '.join(map(str, folders))}{near}")


def _fragment(name: str, where: str, folders: Sequence[Path]) -> Path:
    """The file of an include, in the first of `folders` that has it."""
    problem = f"{where}: no file {name!r} to include in"
    folder = _first_with(name, [*dict.fromkeys(folders)], problem)
    path = (folder / name).resolve()
    if os.path.isabs(name) or not path.is_relative_to(folder):
        raise UserError(f"{where}: include {name!r} leaves {folder}; name a file below it")
    return path


def _nearest_files(name: str, config_dir: Path, is_run: bool) -> str:
    """The files whose name is nearly this one, whatever their folder; of runs, only their own."""
    shares = dict[Path, float]()
    for path in sorted(config_dir.rglob("*.gin"), key=lambda x: len(x.parts)):
        if not is_run or "--gin=" in path.read_text(encoding="utf-8"):
            share = difflib.SequenceMatcher(None, Path(name).stem, path.stem).ratio()
            shares[path.relative_to(config_dir)] = share
    least = max(0.7, 0.95 * max(shares.values(), default=0))
    near = [str(path) for path, share in shares.items() if share >= least][:3]
    found = f"; did you mean {' or '.join(near)}?" if near else ""
    return found or "; `ttcd recipes` lists them" * is_run
