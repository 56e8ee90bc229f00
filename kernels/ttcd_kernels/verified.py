"""The GPUs on which the kernels have been found right, by `ttcd_kernels.check`."""

import functools
import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import jax

from ttcd_kernels import launch

# Compute capabilities. A commit that adds one brings the report of `check` on such a GPU.
VERIFIED: frozenset[int] = frozenset()


def missing(*operands: Any) -> str | None:
    """The reason why "auto" should not take a GPU kernel where the operands are: nobody has seen it
    right on such a GPU. None if somebody has, or if this machine's own `check` has passed with
    these versions; a program of several processes does not ask, since their machines may differ."""
    gpu = launch.capability(*operands)
    if gpu is None or gpu in VERIFIED or (jax.process_count() == 1 and record(gpu).exists()):
        return None
    return (
        f"the kernels have not been checked on a GPU of compute capability {gpu}; run "
        "python -m ttcd_kernels.check once on this machine, or name the implementation"
    )


def record(capability: int) -> Path:
    """The file whose presence says that `check` has passed on this machine: with such a GPU, these
    compilers and this source."""
    versions = [f"{x}-{importlib.metadata.version(x)}" for x in ("jax", "jaxlib", "triton")]
    name = "_".join(["checked", str(capability), *versions, source()])
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "ttcd_kernels" / name


@functools.cache
def source(folder: Path = Path(__file__).parent) -> str:
    """The digest of a package's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
