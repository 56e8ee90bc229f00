"""Memory that the process keeps: its share of an accelerator's, and on a host the memory it freed.

XLA takes three quarters of an accelerator's memory at its start unless it is told otherwise. On a
host, its client allocates the temporaries of a program anew at every call. glibc returns blocks of
that size to the kernel. At the next call it clears and maps every page again: 0.3 million page
faults and an eighth of the time of a small model's step.
"""

import contextlib
import ctypes
import functools
import math
import os
import re
import resource
from pathlib import Path

from ttcd_jax.errors import UserError

MEMORY_SHARE = 0.92  # the rest is for contexts and communication, outside of XLA's pool
RESERVE_BYTES = 2**30  # of the pool, for programs and the gaps between arrays: no plan sees them
SHARE = "XLA_CLIENT_MEM_FRACTION"
_OLD_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_OWN_GROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


@functools.cache
def keep_freed_memory() -> None:
    """Lets this process keep freed memory for its next allocations: its resident memory stays at
    its peak, and grows by fragmentation. Nothing happens where an accelerator computes, where
    variables MALLOC_* or GLIBC_TUNABLES are set, and without glibc."""
    is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    libc = ctypes.CDLL(None)
    if is_set or not is_cpu_alone() or not hasattr(libc, "mallopt"):
        return
    # Threads other than the first would map large blocks, whatever the other two say.
    for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
        libc.mallopt(parameter, value)


def return_freed_memory() -> None:
    """Gives what was freed back to the system: a start and its compiler leave gigabytes behind."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # of glibc
        libc.malloc_trim(0)


def take_device_memory() -> None:
    """Lets XLA take `MEMORY_SHARE` of an accelerator's memory unless the environment says how much.
    Call it before JAX's first array. Raises `UserError` where that is no share."""
    if _given_share() is None:
        os.environ[SHARE] = str(MEMORY_SHARE)


def memory_share() -> float:
    """The share of an accelerator's own memory that XLA takes."""
    return min(_given_share() or MEMORY_SHARE, 1.0)  # more than all is the host's


def _given_share() -> float | None:
    given = [(x, os.environ[x]) for x in (SHARE, _OLD_SHARE) if os.environ.get(x)]
    if not given:
        return None
    share = math.nan
    with contextlib.suppress(ValueError):
        share = float(given[0][1])
    if len(given) > 1 or not 0 < share < math.inf:
        found = " and ".join(f"{name}={text}" for name, text in given)
        raise UserError(f"{found}: set {SHARE} alone, to a share such as {MEMORY_SHARE}")
    return share


def host_bytes() -> int:
    """The host's memory that this process may take: all, or less by its cgroup or `ulimit`."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    sizes += [x for x in resource.getrlimit(resource.RLIMIT_AS)[:1] if x != resource.RLIM_INFINITY]
    with contextlib.suppress(OSError):
        own = re.search("^0::/(.*)$", _OWN_GROUP.read_text(), re.MULTILINE)
        group = _GROUPS / (own[1] if own else "")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                sizes.append(int((folder / "memory.max").read_text()))
    return min(sizes)


def is_cpu_alone() -> bool:
    """Whether JAX computes on the CPU, without asking JAX, which would start its threads."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(Path("/dev", name).exists() for name in ("nvidiactl", "accel0", "vfio", "kfd"))
