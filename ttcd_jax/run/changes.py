"""Differences between a run's configuration and the one it is resumed with: accepted or refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttcd_jax.config import closest
from ttcd_jax.errors import UserError, listed
from ttcd_jax.run.config import LASTING, PLACES


def accepted_changes(
    run_dir: Path, old: dict[str, Any], new: dict[str, Any], named: Sequence[str]
) -> list[dict[str, Any]]:
    """{field, old, new} of every difference: of the fields `named`, by their names in .gin files or
    their paths, and of the places of data, whose digests are compared elsewhere. Raises `UserError`
    for a name without a field, and for any other difference."""
    before, after = _leaves(old), _leaves(new)
    fields = {path: name for path, (name, _) in (before | after).items()}
    for name in named:
        known = [*fields.values(), *fields]
        if name not in known:
            raise UserError(f"--change={name} names no field{closest(name, known)}")
    refused, missing, accepted = [], [], []
    for path, field in fields.items():
        values = [leaves.get(path, (field, None))[1] for leaves in (before, after)]
        if values[0] == values[1]:
            continue
        if field in PLACES or (not _lasts(path, values) and not {field, path}.isdisjoint(named)):
            accepted.append({"field": field, "old": values[0], "new": values[1]})
        else:
            text = f"{path}: {values[0]} -> {values[1]}"
            (refused if _lasts(path, values) else missing).append((text, f"--change={field}"))
    if refused or missing:
        texts = listed([text for text, _ in refused or missing])
        flags = " ".join(flag for _, flag in missing)
        remedy = "" if refused else f"add {flags} to change this run, or "
        raise UserError(
            f"{run_dir} holds a run of another configuration: {texts}; {remedy}choose another "
            "--run_dir, or start again with the old configuration"
        )
    return accepted


def _leaves(config: dict[str, Any], path: str = "") -> dict[str, tuple[str, Any]]:
    """{path: (name in .gin files, value)} of every value below `config`, made by `to_dict`."""
    leaves = {}
    for key, value in config.items():
        if isinstance(value, dict):
            leaves |= _leaves(value, f"{path}{key}.")
        else:
            leaves[path + key] = f"{config.get('type', '')}.{key}", value
    return leaves


def _lasts(path: str, values: list[Any]) -> bool:
    # A clip that begins or ends gives the optimizer's state another structure.
    is_structure = path == "optimizer.clip_norm" and None in values
    return is_structure or any(f"{path}.".startswith(f"{part}.") for part in LASTING)
