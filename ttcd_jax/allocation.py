"""Memory that the process keeps: its share of an accelerator's, and on a host what it freed.

XLA takes three quarters of an accelerator's memory at its start unless it is told otherwise. On a
host, its client allocates the temporaries of a program anew at every call. glibc returns blocks of
that size to the kernel, which then clears and maps every page again at the next call: 0.3 million
page faults and an eighth of the time of a small model's step.
"""

import ctypes
import os
from pathlib import Path

from ttcd_jax.errors import UserError

MEMORY_SHARE = 0.92  # the rest is for contexts and communication, outside of XLA's pool
RESERVE_BYTES = 2**30  # of the pool, for programs and the gaps between arrays: no plan sees them
SHARE = "XLA_CLIENT_MEM_FRACTION"
_OLD_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Lets this process keep what it frees, for its next allocations: its resident memory stays at
    its peak. Call it before JAX's first array. Nothing happens where an accelerator computes, where
    variables MALLOC_* or GLIBC_TUNABLES are set, and without glibc."""
    is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    libc = ctypes.CDLL(None)
    if is_set or not is_cpu_alone() or not hasattr(libc, "mallopt"):
        return
    # Threads other than the first would map large blocks, whatever the other two say.
    for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
        libc.mallopt(parameter, value)


def take_device_memory() -> None:
    """Lets XLA take `MEMORY_SHARE` of an accelerator's memory unless the environment says how much.
    Call it before JAX's first array."""
    if _OLD_SHARE not in os.environ:
        os.environ.setdefault(SHARE, str(MEMORY_SHARE))


def usable_bytes(memory_bytes: float) -> float:
    """What a step may take of an accelerator's memory: XLA's share, less `RESERVE_BYTES`."""
    share = os.environ.get(_OLD_SHARE) or os.environ.get(SHARE) or MEMORY_SHARE
    try:
        return float(share) * memory_bytes - RESERVE_BYTES
    except ValueError as error:
        raise UserError(f"{SHARE}={share} is no number, such as {MEMORY_SHARE}") from error


def is_cpu_alone() -> bool:
    """Whether JAX computes on the CPU, without asking JAX, which would start its threads."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(Path("/dev", name).exists() for name in ("nvidiactl", "accel0", "vfio", "kfd"))
