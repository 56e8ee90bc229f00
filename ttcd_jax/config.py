"""Frozen configuration dataclasses: types and bounds checked at construction, lossless as JSON.

gin and JSON check nothing, so every configuration class inherits `Config`, which makes it a frozen
dataclass of keywords: a field of the wrong type or outside its bounds, an unknown key or a missing
one is a `UserError` that names the field. A bound is part of the field's annotation:
`num_taps: Positive = 5`, `seq_len: Annotated[int, AtLeast(2)]`, `limit: Positive | None = None`.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from ttcd_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Bound:
    """A condition on a field's value; `wording` completes "must be ...". NaN fails every
    comparison, so `allows` is true for allowed values, not false for others."""

    wording: str
    allows: Callable[[Any], bool]


class AtLeast(Bound):
    """Numbers of at least `least`."""

    def __init__(self, least: float) -> None:
        super().__init__(f"at least {least}", lambda value: value >= least)


Positive = Annotated[int, AtLeast(1)]
NonNegative = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Bound("positive and finite", lambda value: 0 < value < math.inf)]
NonNegativeFloat = Annotated[float, Bound("0 or more, finite", lambda value: 0 <= value < math.inf)]
Fraction = Annotated[float, Bound("between 0 and 1", lambda value: 0 <= value <= 1)]
Decay = Annotated[float, Bound("in [0, 1)", lambda value: 0 <= value < 1)]
LIMIT = Bound("a number from 1, or a share below 1", lambda x: 0 < x < 1 or (x >= 1 and x % 1 == 0))
IN_BUCKET = Bound("a path", lambda value: True)  # or an address in a bucket
Place = Annotated[str | None, IN_BUCKET]
DISTINCT = Bound("one or more, none twice", lambda values: 0 < len(values) == len(set(values)))


def describe(hint: Any) -> str:
    """A type as messages and pages show it, without bounds."""
    if get_origin(hint) is Annotated:
        return describe(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return " | ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " | ".join(describe(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        items = ("..." if item is ... else describe(item) for item in get_args(hint))
        return f"tuple[{', '.join(items)}]"
    if hint is types.NoneType:
        return "None"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _problem(value: Any, hint: Any) -> str | None:
    """None for an allowed value, the empty string for one of another type than `hint`, and
    `"must be ..."` with the first bound in `hint` that it violates."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if (problem := _problem(value, args[0])) == "":
            return problem
        bounds = (x for x in hint.__metadata__ if isinstance(x, Bound) and not x.allows(value))
        return next((f"must be {bound.wording}" for bound in bounds), problem)
    if origin is Literal:
        return None if any(value == x and type(value) is type(x) for x in args) else ""
    if origin in (Union, types.UnionType):
        problems = [_problem(value, option) for option in args]
        refusal = None if None in problems else next(filter(None, problems), "")
        return refusal and refusal + ", or None" * (types.NoneType in args)
    if origin is tuple:
        items = args[:1] * len(value) if args[-1] is ... and isinstance(value, tuple) else args
        if not isinstance(value, tuple) or len(items) != len(value):
            return ""
        problems = [_problem(x, item) for x, item in zip(value, items, strict=True)]
        refusal = "" if "" in problems else next(filter(None, problems), None)
        return refusal and re.sub("^must (each )?", "must each ", refusal)
    if hint not in (int, float):
        return None if isinstance(value, hint) else ""
    if isinstance(value, bool) or not isinstance(value, int | hint):
        return ""
    if isinstance(value, float):
        return None if math.isfinite(value) else "must be finite"
    return None if abs(value) < 2**63 else "must be below 2^63"


# `Path` makes one slash of two.
_BUCKET = re.compile(r"(gs|gcs|s3a?|r2|oss|az|abfss?|wasbs?|hdfs|dbfs):/", re.IGNORECASE)
_FILE = re.compile("file:/", re.IGNORECASE)


def check_text(name: str, text: str, *, in_bucket: bool = False) -> None:
    """Raises `UserError` for an empty string, and for the address of a file or a bucket, unless it
    may be `in_bucket`."""
    if not text:
        raise UserError(f"{name} is empty, as after a shell variable that is not set: give a value")
    if _BUCKET.match(text) and not (in_bucket and text.startswith(("gs:/", "s3:/"))):
        raise UserError(
            f"{name} {text!r} is in a bucket, where only records, tokenizers, runs, exports and "
            "saved states are read and written, as gs:// or s3://: copy it to a disk, or mount the "
            "bucket (gcsfuse, mount-s3) and pass its folder"
        )
    if _FILE.match(text):
        raise UserError(f"{name} {text!r} is the address of a file: give its path alone")


def closest(name: str, known: list[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `known`, or the empty string."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """`name: old -> new` for every leaf in which two configurations from `to_dict` differ."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{path}: {old} -> {new}"]
    changes = []
    for name in old | new:
        changes += differences(old.get(name), new.get(name), f"{path}.{name}" if path else name)
    return changes


class _Frozen:
    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


@typing.dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_Frozen):
    """Base of every configuration: fields are checked by type and bounds, then by `validate`."""

    def __init_subclass__(cls) -> None:
        """Makes the class a dataclass, which a decorator may do again. The docstrings of bases with
        fields follow that of the class: `help` explains all."""
        super().__init_subclass__()
        bases = (x for x in cls.__bases__ if issubclass(x, Config) and dataclasses.fields(x))
        texts = [inspect.cleandoc(x.__doc__ or "") for x in (cls, *bases)]
        cls.__doc__ = "\n\n".join(dict.fromkeys("\n\n".join(texts).split("\n\n")))
        given = {name: x for name, x in vars(cls).items() if isinstance(x, dataclasses.Field)}
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        del cls.__setattr__, cls.__delattr__  # those of `_Frozen` are left
        for name, field in given.items():
            setattr(cls, name, field)

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Raises `UserError` for a name that is not a field."""
        fields = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in fields:
                raise UserError(f"{cls.__name__} has no field {name!r}{closest(name, fields)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            name = f"{type(self).__name__}.{field.name}"
            if isinstance(value, list | tuple):
                value = _tuples(value)
                object.__setattr__(self, field.name, value)
            if (problem := _problem(value, hint)) == "":
                found = f"{value!r} ({type(value).__name__})"
                raise UserError(f"{name} must be {describe(hint)}, got {found}")
            in_bucket = IN_BUCKET in getattr(hint, "__metadata__", ())
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str):
                    check_text(name, text, in_bucket=in_bucket)
            if problem:
                raise UserError(f"{name} {value} {problem}")
        self.validate()

    registry: ClassVar[Any]  # of the classes that a field of a base can hold

    @classmethod
    def alternatives(cls) -> list[type["Config"]]:
        """The classes that a field of this type can hold: this one alone, or those registered."""
        return cls.registry.classes() if "registry" in vars(cls) else [cls]

    def overridden(self, values: dict[str, Any], bound: Collection[str]) -> Self:
        """This configuration with `values` for all fields, of which those `bound` override its own;
        others that they make meaningless have their defaults."""
        return type(self)(**values)

    def validate(self) -> None:
        """Raises `UserError` for values that contradict each other."""

    def replace(self, **changes: Any) -> Self:
        """A copy with the given fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; nested configurations carry their class name under `type`."""
        names = [field.name for field in dataclasses.fields(self)]
        return {"type": type(self).__name__} | {x: _jsonable(getattr(self, x)) for x in names}

    @classmethod
    def from_dict(cls, source: dict[str, Any]) -> Self:
        """The inverse of `to_dict`; a `type` is needed where a field can hold several. A missing
        key has its default, as in a file older than the field; unknown keys, and missing ones
        without a default, are a `UserError`."""
        if not isinstance(source, dict):
            raise UserError(f"{cls.__name__} is a {type(source).__name__}, not an object of fields")
        hints = typing.get_type_hints(cls)
        if missing := [name for name in required_fields(cls) if name not in source]:
            raise UserError(f"{cls.__name__} lacks {', '.join(missing)}")
        return cls(**{x: _revive(source[x], hints.get(x)) for x in source if x != "type"})


def read_fields[T](kind: type[T], found: Any) -> T:
    """The NamedTuple of the fields in an object of JSON; others there are ignored. Raises
    `ValueError` for a field that is missing, or of another type."""
    hints = _field_hints(kind)
    if not isinstance(found, dict):
        raise ValueError(f"a {kind.__name__} is a {type(found).__name__}, not an object of fields")
    try:
        values = kind(**{name: found[name] for name in hints if name in found})
    except TypeError as error:
        raise ValueError(str(error)) from error
    for name, hint in hints.items():
        if _problem(value := getattr(values, name), hint) == "":
            raise ValueError(f"{kind.__name__}.{name} must be {describe(hint)}, got {value!r}")
    return values


_field_hints = functools.cache(typing.get_type_hints)


def required_fields(config: type[Config]) -> list[str]:
    """The names of the fields without a default."""
    fields = dataclasses.fields(config)
    return [x.name for x in fields if x.default is x.default_factory is dataclasses.MISSING]


def config_classes(hint: Any) -> list[type[Config]]:
    """The configuration classes that a field with this hint can hold."""
    if isinstance(hint, type) and issubclass(hint, Config):
        return hint.alternatives()
    return [cls for option in get_args(hint) for cls in config_classes(option)]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(entry) for entry in value]
    return value.to_dict() if isinstance(value, Config) else value


def _revive(value: Any, hint: Any) -> Any:
    if isinstance(value, list):
        return [_revive(entry, hint) for entry in value]
    classes = config_classes(hint)
    if not (isinstance(value, dict) and classes):
        return value
    name = value.get("type", classes[0].__name__ if len(classes) == 1 else None)
    for cls in classes:
        if cls.__name__ == name:
            return cls.from_dict(value)
    raise UserError(f"no configuration class {name!r} is allowed here ({describe(hint)})")
