"""Whether stored arrays fit a model, told by name: what is missing, too much, of another kind."""

from collections.abc import Mapping
from typing import Any

_SHOWN = 4


def misfit(
    model: Mapping[str, Any], stored: Mapping[str, Any], fields: tuple[str, ...] = ("shape",)
) -> str | None:
    """One line of everything in which `stored` differs from `model`, None when it fits.

    Both map names to arrays (or `jax.ShapeDtypeStruct`s), of which `fields` are compared. Each
    list shows the first few names.
    """
    common = sorted(model.keys() & stored.keys())

    def differing(field: str) -> list[str]:
        pairs = [
            (name, getattr(stored[name], field), getattr(model[name], field)) for name in common
        ]
        return [f"{name} {saved} not {wanted}" for name, saved, wanted in pairs if saved != wanted]

    report = [
        _listed(sorted(model.keys() - stored.keys()), "only in the model"),
        _listed(sorted(stored.keys() - model.keys()), "only in the checkpoint"),
        *(_listed(differing(field), f"saved with another {field}") for field in fields),
    ]
    return "; ".join(filter(None, report)) or None


def _listed(problems: list[str], what: str) -> str | None:
    if not problems:
        return None
    more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return f"{len(problems)} {what}: {', '.join(problems[:_SHOWN])}{more}"
