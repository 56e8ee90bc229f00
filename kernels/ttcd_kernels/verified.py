"""The GPUs on which the kernels have been found right, by `ttcd_kernels.check`."""

import functools
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import jax

from ttcd_kernels import launch
from ttcd_kernels.table import write_json

# Compute capabilities. A commit that adds one brings the report of `check` on such a GPU.
VERIFIED: frozenset[int] = frozenset()


def missing(*operands: Any) -> str | None:
    """The reason why "auto" should not take a GPU kernel where the operands are: nobody has seen it
    right on such a GPU. None if somebody has, or if this machine's own `check` has passed with
    these versions; a program of several processes does not ask, since their machines may differ."""
    gpu = launch.capability(*operands)
    if gpu is None or gpu in VERIFIED:
        return None
    if jax.process_count() == 1 and conditions(gpu) in passed():
        return None
    return (
        f"the kernels have not been checked on a GPU of compute capability {gpu}; run "
        "python -m ttcd_kernels.check once on this machine, or name the implementation"
    )


def record(capability: int) -> Path:
    """Remembers that `check` has passed on this machine; the file."""
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json([*passed(), conditions(capability)], file)
    return file


def passed() -> list[dict[str, Any]]:
    """The checks that have passed on this machine; nothing where the file is missing or damaged."""
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def conditions(capability: int) -> dict[str, Any]:
    """The conditions that a check holds for: the GPU, the compilers, the source of this package."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "triton")}
    return {"capability": capability, **versions, "source": source()}


@functools.cache
def source(folder: Path = Path(__file__).parent) -> str:
    """The digest of a package's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "ttcd_kernels" / "checked.json"
