"""One frozen configuration tree from a .gin file and `--param` bindings.

Every dataclass that the root's type hints reach is known by its class name:

    include 'model/tiny.gin'              fragments first, relative to the configuration directory
    SEQ_LEN = 256                         a macro
    RunConfig.seq_len = %SEQ_LEN
    RunConfig.data = @RecallConfig()      the class that fills a field
    RunConfig.teacher = @teacher/AttentionConfig()
    teacher/AttentionConfig.window = 64   applies inside that scope only

A field that can hold exactly one class and has no default is built without a binding. The language
and its scoping are gin's; the tree is built here, because gin forgets the location of a binding,
checks no type, has one registry per process and lets a file import and call anything.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.gin_reading import (
    Binding,
    Key,
    Macro,
    Reference,
    find_gin_file,
    mentions,
    read_file,
    read_params,
)
from ttcd_jax.config import Config, closest, config_classes
from ttcd_jax.errors import UserError

Classes = dict[str, type[Config]]
# (required field without a binding, the bound values of others) -> a configuration to inherit, in
# which single bindings replace fields; None to build one from the class's defaults.
Inherit = Callable[[str, dict[str, Any]], Config | None]


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
    classes = reachable_classes(root)
    from_file = read_file(find_gin_file(gin_file, config_dir), config_dir)
    from_params = read_params(params, config_dir)
    bindings = from_file | from_params
    replaced = [from_file[key] for key in from_params if key in from_file]
    _check_names([*replaced, *bindings.values()], classes)
    builder = _Builder(classes, bindings, inherit)
    config = builder.build(root, scope="")
    _check_use(bindings, builder.used, replaced, classes)
    return config


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
        assert classes[cls.__name__] is cls, f"two configuration classes are called {cls.__name__}"
    return classes


class _Builder:
    """Constructs configurations; `used` collects the keys that applied to one."""

    def __init__(self, classes: Classes, bindings: dict[Key, Binding], inherit: Inherit) -> None:
        self.classes, self.bindings, self.inherit = classes, bindings, inherit
        self.used: set[Key] = set()
        self._open: list[str] = []

    def build[C: Config](self, cls: type[C], scope: str, base: Config | None = None) -> C:
        """An instance of `cls` with the bindings of `scope` and the scopes around it, otherwise the
        fields of `base`, whose nested configurations take bindings too."""
        self._enter("/".join(filter(None, (scope, cls.__name__))))
        hints = typing.get_type_hints(cls)
        values, locations, open_fields, missing = {}, {}, [], []
        for field in dataclasses.fields(cls):
            binding = self._find(cls.__name__, field.name, scope)
            if binding:
                values[field.name] = self._evaluate(binding.value, scope)
                locations[field.name] = binding.where
            elif base is not None:
                value = getattr(base, field.name)
                is_nested = isinstance(value, Config)
                value = self.build(type(value), scope, base=value) if is_nested else value
                values[field.name] = value
            elif field.default is field.default_factory is dataclasses.MISSING:
                if config_classes(hints[field.name]) == [hints[field.name]]:
                    open_fields.append(field.name)
                else:
                    missing.append(f"{cls.__name__}.{field.name} = {_example(hints[field.name])}")
        for name in open_fields:
            values[name] = self.build(hints[name], scope, base=self.inherit(name, values))
        if missing:
            raise UserError(f"{cls.__name__} lacks a value; bind {', '.join(missing)}")
        self._open.pop()
        if base is not None:
            values = cls.reconciled(values, bound=locations.keys())
        return _construct(cls, values, locations)

    def _find(self, owner: str, field: str, scope: str) -> Binding | None:
        """The binding of the innermost scope; the outer ones that it overrides count as used."""
        parts = scope.split("/") if scope else []
        keys = [("/".join(parts[:depth]), owner, field) for depth in range(len(parts), -1, -1)]
        matches = [self.bindings[key] for key in keys if key in self.bindings]
        self.used.update(binding.key for binding in matches)
        return matches[0] if matches else None

    def _evaluate(self, value: Any, scope: str) -> Any:
        if isinstance(value, Reference):
            return self.build(self.classes[value.name], value.scope or scope)
        if isinstance(value, Macro):
            self._enter(f"%{value.name}")
            result = self._evaluate(self.bindings["", value.name, ""].value, scope)
            self._open.pop()
            return result
        if isinstance(value, list | tuple):
            return tuple(self._evaluate(item, scope) for item in value)
        return value

    def _enter(self, name: str) -> None:
        if name in self._open:
            raise UserError(
                f"the configuration contains itself: {' -> '.join((*self._open, name))}"
            )
        self._open.append(name)


def _construct[C: Config](cls: type[C], values: dict[str, Any], locations: dict[str, str]) -> C:
    """`cls(**values)`; an error that names a bound field gains the location of its binding."""
    try:
        return cls(**values)
    except UserError as error:
        for field, where in locations.items():
            if str(error).startswith(f"{cls.__name__}.{field} "):
                raise type(error)(f"{where}: {error}") from None
        raise


def _example(hint: Any) -> str:
    choices = " or ".join(f"@{cls.__name__}()" for cls in config_classes(hint))
    return choices or f"<{getattr(hint, '__name__', hint)}>"


def _check_names(bindings: Sequence[Binding], classes: Classes) -> None:
    """Raises `UserError` for an unknown class, field or macro."""
    macros = [binding.owner for binding in bindings if not binding.field]
    for binding in bindings:
        if binding.field:
            _check_class(binding.owner, binding.where, classes)
            fields = [field.name for field in dataclasses.fields(classes[binding.owner])]
            if binding.field not in fields:
                near = closest(binding.field, fields)
                raise UserError(
                    f"{binding.where}: {binding.owner} has no field {binding.field!r}{near}"
                )
        for mention in mentions(binding.value):
            if isinstance(mention, Reference):
                _check_class(mention.name, binding.where, classes)
                if not mention.is_called:
                    raise UserError(f"{binding.where}: write @{mention.name}(), with parentheses")
            elif mention.name not in macros:
                near = closest(mention.name, macros)
                raise UserError(f"{binding.where}: no macro %{mention.name} is defined{near}")


def _check_class(name: str, where: str, classes: Classes) -> None:
    if name not in classes:
        near = closest(name, list(classes)) or f"; known are {', '.join(sorted(classes))}"
        raise UserError(f"{where}: no configuration class {name!r}{near}")


def _check_use(
    bindings: dict[Key, Binding], used: set[Key], replaced: Sequence[Binding], classes: Classes
) -> None:
    """Raises `UserError` for a binding that applied to nothing and a macro that is never used."""
    everything = [*replaced, *bindings.values()]
    mentioned = {mention.name for binding in everything for mention in mentions(binding.value)}
    excused = _replaced_classes(replaced, bindings, classes)
    for key, binding in bindings.items():
        if not binding.field:
            if binding.owner not in mentioned:
                near = closest(binding.owner, list(classes))
                raise UserError(f"{binding.where}: macro {binding.owner} is never used{near}")
        elif key not in used and binding.owner not in excused:
            raise UserError(_unused(binding, classes))


def _replaced_classes(
    replaced: Iterable[Binding], bindings: dict[Key, Binding], classes: Classes
) -> set[str]:
    """Names of the classes, nested ones included, that the replaced bindings would have built."""
    pending = [mention for binding in replaced for mention in mentions(binding.value)]
    names: set[str] = set()
    for mention in pending:  # grows
        if isinstance(mention, Reference):
            names |= reachable_classes(classes[mention.name]).keys()
        elif mention.name not in names:
            names.add(mention.name)
            pending += mentions(bindings["", mention.name, ""].value)
    return names


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
        f"remove it or bind {' or '.join(holders)}"
    )
