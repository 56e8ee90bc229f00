"""Frozen configuration dataclasses: types checked at construction, exact JSON both ways.

gin and JSON check nothing themselves, so every configuration class inherits `Config`: a field of
the wrong type, an unknown key or a missing one is a `UserError` that names the field.
"""

import dataclasses
import difflib
import types
import typing
from typing import Any, Literal, Self, Union, get_args, get_origin

from ttcd_jax.errors import UserError


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " | ".join(_describe(option) for option in get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _matches(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in get_args(hint))
    if origin is tuple:
        item = get_args(hint)[0]
        return isinstance(value, tuple) and all(_matches(entry, item) for entry in value)
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def closest(name: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `known`, or the empty string."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """`name: old -> new` for every leaf in which two configurations differ, as `to_dict` or JSON
    gives them."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if _plain(old) == _plain(new) else [f"{path}: {_plain(old)} -> {_plain(new)}"]
    names = [*old, *(name for name in new if name not in old)]
    return [
        difference
        for name in names
        for difference in differences(
            old.get(name), new.get(name), f"{path}.{name}" if path else name
        )
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every configuration: field types are checked, then `validate` checks the values."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            if not _matches(value, hints[field.name]):
                raise UserError(
                    f"{type(self).__name__}.{field.name} must be {_describe(hints[field.name])}, "
                    f"got {value!r} ({type(value).__name__})"
                )
        self.validate()

    def validate(self) -> None:
        """Raises `UserError` when the values do not fit together."""

    def replace(self, **changes: Any) -> Self:
        """A copy with the given fields changed, validated anew."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; nested configurations carry their class name under `type`."""
        fields: dict[str, Any] = {"type": type(self).__name__}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            fields[field.name] = value.to_dict() if isinstance(value, Config) else value
        return fields

    @classmethod
    def from_dict(cls, source: dict[str, Any]) -> Self:
        """The inverse of `to_dict`. Unknown or missing keys are a `UserError`."""
        hints = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        for key in source:
            if key != "type" and key not in names:
                raise UserError(f"{cls.__name__} has no field {key!r}{closest(key, names)}")
        missing = [name for name in names if name not in source]
        if missing:
            raise UserError(f"{cls.__name__} lacks {', '.join(missing)}")
        return cls(**{name: _revive(source[name], hints[name]) for name in names})


def _config_classes(hint: Any) -> list[type[Config]]:
    if isinstance(hint, type) and issubclass(hint, Config):
        return [hint]
    return [cls for option in get_args(hint) for cls in _config_classes(option)]


def _revive(value: Any, hint: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for cls in _config_classes(hint):
        if cls.__name__ == value.get("type"):
            return cls.from_dict(value)
    raise UserError(
        f"no configuration class {value.get('type')!r} is allowed here ({_describe(hint)})"
    )
