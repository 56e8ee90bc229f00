"""Changes of a trained model's configuration that keep its parameters: other windows, YaRN."""

import ast
import re
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

from ttcd_jax.config import Config, closest, config_classes
from ttcd_jax.errors import UserError
from ttcd_jax.methods import method_named
from ttcd_jax.models.config import TransformerConfig, block_configs
from ttcd_jax.train.state import abstract_params


class _Change(NamedTuple):
    text: str
    owner: str  # the class
    field: str
    value: Any  # as in `Config.to_dict`


def changed_model(config: TransformerConfig, changes: Sequence[str]) -> TransformerConfig:
    """`config` with the bindings `changes`, each `Class.field=VALUE`, in every configuration of
    that class inside it.

        TransformerConfig.window=8192
        RopeConfig.yarn=YarnConfig(factor=8, original_length=4096)

    VALUE is a Python literal, a string without quotes, or a configuration as above or as a dict. A
    window, or none, makes a plain transformer one of the other kind (`Method.twin`).
    Raises `UserError` for an unknown name or a wrong value, and, naming the binding, for one that
    changes the parameters or that has no effect on the model.
    """
    if not changes:
        return config
    config = config.replace(memory=config.settings)  # settings that are defaults change as well
    parts = _parts(config)
    parsed = [_parsed(text, parts) for text in changes]
    names = [(change.owner, change.field) for change in parsed]
    for change in parsed:
        if names.count((change.owner, change.field)) > 1:
            raise UserError(f"{change.owner}.{change.field} is bound twice: give it one value")
        if "init" in change.field.split("_"):
            raise UserError(
                f"{change.text} is for parameters that are drawn, and these are trained"
            )
    changed = _applied(config, parsed)
    if _params_differ(config, changed):
        culprits = [x.text for x in parsed if _params_differ(config, _alone(config, [x]))]
        raise UserError(
            f"{' and '.join(culprits or changes)} changes shapes, types or names of parameters, "
            "and they are trained: change what only their use depends on, as a window"
        )
    for change in parsed:
        without = _alone(config, [other for other in parsed if other is not change])
        if without is not None and block_configs(without) == block_configs(changed):
            raise UserError(f"{change.text} changes nothing that this model computes: leave it out")
    return changed


def describe(changes: Sequence[str]) -> str:
    """The bindings in words, for labels: `window 8192, yarn factor=8 original_length=4096`."""

    def words(value: Any) -> str:
        if not isinstance(value, dict):
            return str(value)
        return " ".join(f"{name}={value[name]}" for name in value if name != "type")

    return ", ".join(f"{x.field} {words(x.value)}" for x in map(_parsed, changes))


def _parts(config: Config) -> dict[str, type[Config]]:
    """The classes of `config` and of the configurations inside it."""
    inner = [value for value in vars(config).values() if isinstance(value, Config)]
    parts = {type(config).__name__: type(config)}
    return parts | {name: cls for part in inner for name, cls in _parts(part).items()}


def _parsed(text: str, parts: dict[str, type[Config]] | None = None) -> _Change:
    """One binding; with `parts`, the classes of the model, one that is possible there."""
    found = re.fullmatch(r"\s*(\w+)\.(\w+)\s*=(.*)", text, re.DOTALL)
    if found is None:
        raise UserError(
            f"--param={text!r} is not Class.field=VALUE, as TransformerConfig.window=8192"
        )
    owner, field, value = found[1], found[2], _literal(found[3].strip())
    if parts is not None and owner not in parts:
        raise UserError(
            f"{text}: the model consists of {', '.join(parts)}{closest(owner, [*parts])}"
        )
    if isinstance(value, str) and (reference := re.fullmatch(r"@(?:\w+/)?(\w+)(\(\))?", value)):
        raise UserError(f"{text}: write {reference[1]}(field=value, ...) in place of {value}")
    if parts is not None and isinstance(value, dict) and "type" not in value:
        classes = config_classes(typing.get_type_hints(parts[owner]).get(field))
        value = ({"type": classes[0].__name__} | value) if len(classes) == 1 else value
    return _Change(text, owner, field, value)


def _literal(text: str) -> Any:
    """The value that `text` spells, `Name(field=value)` as a dict; else `text`, which the field
    checks."""
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            fields = {str(x.arg): ast.literal_eval(x.value) for x in node.keywords}
            return {"type": node.func.id} | fields
        return ast.literal_eval(node)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return text


def _applied(config: TransformerConfig, changes: Sequence[_Change]) -> TransformerConfig:
    def with_changes(source: dict[str, Any]) -> dict[str, Any]:
        own = {x.field: x.value for x in changes if x.owner == source.get("type")}
        if "window" in own and "method" in source and "method" not in own:
            twin = method_named(source["method"]).twin
            if twin is not None and (own["window"] is None) != (source["window"] is None):
                own["method"] = twin
        return {
            name: with_changes(value) if isinstance(value, dict) else value
            for name, value in (source | own).items()
        }

    return TransformerConfig.from_dict(with_changes(config.to_dict()))


def _alone(config: TransformerConfig, changes: Sequence[_Change]) -> TransformerConfig | None:
    """`config` with some of the changes; None where they are impossible without the others."""
    try:
        return _applied(config, changes)
    except UserError:
        return None


def _params_differ(config: TransformerConfig, other: TransformerConfig | None) -> bool:
    return other is not None and abstract_params(config) != abstract_params(other)
