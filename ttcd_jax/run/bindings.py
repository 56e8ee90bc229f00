"""One frozen configuration tree from the bindings of a .gin file and of `--param`.

Every dataclass that the root's type hints reach is known by its class name:

    include 'model/tiny.gin'              fragments first: beside this file, else among the recipes
    SEQ_LEN = 256                         a macro
    RunConfig.seq_len = %SEQ_LEN
    RunConfig.data = @RecallConfig()      the class that fills a field
    RunConfig.teacher = @teacher/AttentionConfig()
    teacher/AttentionConfig.window = 64   applies inside that scope only

A field that can hold exactly one class and has no default is built without a binding. gin parses
the bindings and calls the classes; here every binding is checked before one is called, so that a
file cannot import or call anything else, and every mistake has its file and line.
"""

import dataclasses
import difflib
import graphlib
import importlib.util
import os
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gin import config as shared_gin
from gin import config_parser

from ttcd_jax.config import Config, closest, config_classes, required_fields
from ttcd_jax.errors import UserError
from ttcd_jax.registry import OF_YOUR_OWN

Classes = dict[str, type[Config]]
# (required field without a binding, the bound values of others) -> a configuration to inherit, in
# which single bindings replace fields; None to build one from the class's defaults.
Inherit = Callable[[str, dict[str, Any]], Config | None]

_MAX_BYTES = 2**20  # of a file
_TAKEN_BY = {"RunConfig": "launch", "StudyConfig": "study"}


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
    runtime = _Runtime(root, inherit)
    bindings = read_file(find_gin_file(gin_file, config_dir), config_dir, runtime.gin)
    return runtime.build(bindings, read_params(params, config_dir, runtime.gin))


def rebound[C: Config](config: C, params: Sequence[str]) -> C:
    """`config` with the bindings `params` in every configuration of their class inside it. Raises
    `UserError` as `load_config`."""
    runtime = _Runtime(type(config), lambda field, values: None)
    return runtime.build({}, read_params(params, Path.cwd(), runtime.gin), config)


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


class _Runtime:
    """gin with the classes of one root, whose constructors inherit, report and check."""

    def __init__(self, root: type[Config], inherit: Inherit) -> None:
        self.root, self.inherit, self.classes = root, inherit, reachable_classes(root)
        # With its own registry: gin has one in a module, and the program around us may use that.
        self.gin = importlib.util.module_from_spec(shared_gin.__spec__)
        shared_gin.__spec__.loader.exec_module(self.gin)
        self._make = {cls: self._constructor(cls) for cls in self.classes.values()}
        self._bindings: Bindings = {}
        self._used: set[tuple[str, str, str]] = set()
        self._error: UserError | None = None

    def build(self, bindings: Bindings, overrides: Bindings, base: Config | None = None) -> Any:
        """The root with `bindings | overrides`, its other fields those of `base`, if given."""
        replaced = [bindings[key] for key in overrides if key in bindings]
        self._bindings = bindings | overrides
        everything = [*replaced, *self._bindings.values()]
        _check_names(everything, self.classes)
        for (scope, owner, field), binding in self._bindings.items():
            key = (scope, owner, field) if field else (owner, "gin.macro", "value")
            self.gin.bind_parameter(key, binding.value)
        try:
            config = self._make[self.root](_base=base)
        except UserError as error:
            raise (self._error or error) from None
        except RecursionError:
            raise UserError(f"the configuration contains itself{_cycle(everything)}") from None
        self._check_use(replaced)
        return config

    def _constructor(self, cls: type[Config]) -> Callable[..., Config]:
        hints, required = typing.get_type_hints(cls), required_fields(cls)

        def construct(*, _base: Config | None = None, **values: Any) -> Config:
            bound = {name: self._where(cls.__name__, name) for name in values}
            try:
                if _base is not None:
                    for name in (x.name for x in dataclasses.fields(cls) if x.name not in bound):
                        values[name] = value = getattr(_base, name)
                        if isinstance(value, Config):
                            values[name] = self._make[type(value)](_base=value)
                    return _base.overridden(values, bound)
                missing = [name for name in required if name not in bound]
                for name in [x for x in missing if config_classes(hints[x]) == [hints[x]]]:
                    values[name] = self._make[hints[name]](_base=self.inherit(name, values))
                    missing.remove(name)
                if missing:
                    needed = (f"{cls.__name__}.{x} = {_example(hints[x])}" for x in missing)
                    raise UserError(f"{cls.__name__} lacks a value; bind {', '.join(needed)}")
                return cls(**values)
            except UserError as error:
                if self._error is None:  # outer ones see it again, with lines that gin adds
                    owner, _, name = str(error).partition(" ")[0].partition(".")
                    where = bound.get(name) if owner == cls.__name__ else None
                    self._error = type(error)(f"{where}: {error}") if where else error
                raise self._error from None

        return self.gin.external_configurable(construct, name=cls.__name__, module="ttcd_jax")

    def _where(self, owner: str, field: str) -> str:
        """The location of the binding that applies in gin's scope, the innermost; those of outer
        scopes that it overrides are used too."""
        scope = self.gin.current_scope()
        keys = [("/".join(scope[:depth]), owner, field) for depth in range(len(scope), -1, -1)]
        found = [key for key in keys if key in self._bindings]
        self._used.update(found)
        return self._bindings[found[0]].where

    def _check_use(self, replaced: Sequence[Binding]) -> None:
        """Raises `UserError` for a binding without effect and an unused macro; those of the classes
        that the replaced bindings would have built are excused."""
        mentioned, excused = set(), set()
        for binding in [*replaced, *self._bindings.values()]:
            own = "" if binding.field else binding.owner
            mentioned |= {*map(_macro, _mentions(binding.value))} - {own}
        pending = [mention for binding in replaced for mention in _mentions(binding.value)]
        for mention in pending:  # grows
            if macro := _macro(mention):
                pending += _mentions(self._bindings["", macro, ""].value)
            else:
                excused |= reachable_classes(self.classes[mention.selector]).keys()
        for key, binding in self._bindings.items():
            if not binding.field and binding.owner not in mentioned:
                near = closest(binding.owner, [*self.classes])
                near = near or ": where a field that read it is bound again, set it instead"
                raise UserError(f"{binding.where}: macro {binding.owner} is never used{near}")
            if binding.field and key not in self._used and binding.owner not in excused:
                raise UserError(_unused(binding, self.classes))


def _mentions(value: Any) -> list[Any]:
    """gin's references, of classes and macros, inside a bound value."""
    if isinstance(value, list | tuple):
        return [mention for item in value for mention in _mentions(item)]
    return [value] * hasattr(value, "selector")


def _macro(mention: Any) -> str:
    """The name of a mentioned macro, empty for a class."""
    return "/".join(mention.scopes) if mention.selector == "gin.macro" else ""


def _cycle(bindings: Iterable[Binding]) -> str:
    graph: dict[str, set[str]] = {}
    for binding in bindings:
        names = {_macro(x) or x.selector for x in _mentions(binding.value)}
        graph[binding.owner] = names | graph.get(binding.owner, set())
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return f": {' -> '.join(reversed(error.args[1]))}"
    return ""


def _example(hint: Any) -> str:
    choices = " or ".join(f"@{cls.__name__}()" for cls in config_classes(hint))
    return choices or f"<{getattr(hint, '__name__', hint)}>"


def _check_names(bindings: Sequence[Binding], classes: Classes) -> None:
    """Raises `UserError` for an unknown class, field or macro."""
    for name, where in {x.owner: x.where for x in bindings if x.owner in _TAKEN_BY}.items():
        if name not in classes:
            raise UserError(f"{where}: {name} is for ttcd {_TAKEN_BY[name]}, not this command")
    macros = [binding.owner for binding in bindings if not binding.field]
    for _, owner, field, value, where in bindings:
        mentions = _mentions(value)
        for name in [owner] * bool(field) + [x.selector for x in mentions if not _macro(x)]:
            if name not in classes:
                near = closest(name, [*classes]) or f"; known are {', '.join(sorted(classes))}"
                raise UserError(f"{where}: no configuration class {name!r}{near} {OF_YOUR_OWN}")
        fields = [x.name for x in dataclasses.fields(classes[owner])] if field else [""]
        if field not in fields:
            near = closest(field, fields)
            if hasattr(classes[owner], field):
                near = ": annotate it there"
            raise UserError(f"{where}: {owner} has no field {field!r}{near}")
        for mention in mentions:
            if (name := _macro(mention)) and name not in macros:
                raise UserError(f"{where}: no macro %{name} is defined{closest(name, macros)}")
            if not mention.evaluate:
                raise UserError(f"{where}: write @{mention.selector}(), with parentheses")


def _is_tuple(hint: Any) -> bool:
    return any(typing.get_origin(x) is tuple for x in (hint, *typing.get_args(hint)))


def _unused(binding: Binding, classes: Classes) -> str:
    target = f"@{binding.scope}/{binding.owner}()" if binding.scope else f"@{binding.owner}()"
    holders = [
        f"{cls.__name__}.{field} = {f'({target},)' if _is_tuple(hint) else target}"
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


def read_file(
    path: Path,
    config_dir: Path,
    runtime: types.ModuleType = shared_gin,
    parents: tuple[Path, ...] = (),
) -> Bindings:
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
    for statement, where in _parse(_text(path), lambda line: f"{shown}:{line}", runtime):
        if isinstance(statement, Binding):
            _add(own, statement, "keep one")
        elif own:
            raise UserError(f"{where}: includes come before the bindings that override them")
        else:
            fragment = _fragment(statement, where, (path.parent, config_dir))
            included += read_file(fragment, config_dir, runtime, (*parents, path)).values()
    bindings = dict(own)
    for binding in included:
        if binding[:3] not in own:
            _add(bindings, binding, "keep one, or bind it in the including file")
    return bindings


def read_params(
    params: Sequence[str], config_dir: Path, runtime: types.ModuleType = shared_gin
) -> Bindings:
    """The bindings of the command line and of the fragments it includes; the last of a key wins."""
    bindings: Bindings = {}
    for param in params:
        for statement, where in _parse(param, lambda _, param=param: f"--param {param}", runtime):
            if isinstance(statement, Binding):
                bindings[statement[:3]] = statement
            else:
                path = _fragment(statement, where, (config_dir.resolve(), Path.cwd()))
                bindings |= read_file(path, config_dir, runtime)
    return bindings


def _add(bindings: Bindings, binding: Binding, remedy: str) -> None:
    if (first := bindings.setdefault(binding[:3], binding)).where != binding.where:
        where = f"already bound at {first.where}"
        raise UserError(f"{binding.where}: {binding.name} is {where}; {remedy}")


def _parse(
    text: str, locate: Callable[[int], str], runtime: types.ModuleType
) -> list[tuple[Binding | str, str]]:
    """Bindings, and files to include, each with its location. `UserError` for an import."""
    try:
        delegate = runtime.ParserDelegate(skip_unknown=True)  # names are checked later
        statements = list(config_parser.ConfigParser(text, delegate))
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
