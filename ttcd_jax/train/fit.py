"""The leaves of a tree by name, and how those on disk differ from a model's."""

from collections.abc import Mapping
from typing import Any

import jax

from ttcd_jax.errors import listed


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of any tree by their path, `params/embedding`, in the order of its leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def misfit(
    model: Mapping[str, Any], stored: Mapping[str, Any], fields: tuple[str, ...] = ("shape",)
) -> str | None:
    """One line with every difference of `stored` from `model`, None when it fits. Both map names
    to arrays (or `jax.ShapeDtypeStruct`s), of which `fields` are compared."""
    groups = {
        "only in the model": sorted(model.keys() - stored.keys()),
        "only in the checkpoint": sorted(stored.keys() - model.keys()),
    }
    common = sorted(model.keys() & stored.keys())
    for field in fields:
        kinds = ((x, getattr(stored[x], field), getattr(model[x], field)) for x in common)
        groups[f"saved with another {field}"] = [
            f"{name} {saved} not {wanted}" for name, saved, wanted in kinds if saved != wanted
        ]
    lines = [f"{len(names)} {kind}: {listed(names)}" for kind, names in groups.items() if names]
    return "; ".join(lines) or None
