"""The GPUs on which the kernels have been found right, and the digest of sources."""

import functools
import hashlib
from pathlib import Path
from typing import Any

from ttcd_kernels import launch

# Compute capabilities. A commit that adds one brings the report of experiments/studies/kernels on
# such a GPU.
VERIFIED = frozenset({90})


def missing(*operands: Any) -> str | None:
    """The reason why "auto" should not take a GPU kernel where the operands are: nobody has seen it
    right on such a GPU."""
    gpu = launch.capability(*operands)
    if gpu is None or gpu in VERIFIED:
        return None
    return f"the kernels have not been checked on a GPU of compute capability {gpu}: name them"


@functools.cache
def source(folder: Path = Path(__file__).parent) -> str:
    """The digest of a package's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
