"""Tools shared by the benchmarks of kernels and models: interleaved timing, bytes of compiled
programs, the machine and its ceilings, units."""

import importlib.metadata
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

type Row = dict[str, Any]  # a table's row: values by column
MILLISECOND, MIB, TERA = 1e-3, 2**20, 1e12

_MIN_SAMPLE_SECONDS = 0.02  # shorter programs are called several times per sample
_MAX_CALLS = 50
_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,power.limit"


def median_seconds[Name: Hashable](
    programs: Mapping[Name, Callable[[], Any]], rounds: int
) -> dict[Name, float]:
    """Seconds per call of each program: the median of rounds that time every program in turn: a
    machine shared with others slows all of them alike."""
    calls = {}
    for name, program in programs.items():
        first = _seconds(program, 1)  # also the warm-up
        calls[name] = min(max(math.ceil(_MIN_SAMPLE_SECONDS / first), 1), _MAX_CALLS)
    rows = [[_seconds(programs[name], n) for name, n in calls.items()] for _ in range(rounds)]
    return dict(zip(programs, np.median(rows, 0).tolist(), strict=True))


def _seconds(program: Callable[[], Any], calls: int) -> float:
    start, result = time.perf_counter(), None
    for _ in range(calls):
        result = program()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


class Ceilings(NamedTuple):
    """The measured peak rates of this device: of a large matrix product, and of a copy."""

    flops_per_second: float
    bytes_per_second: float


def ceilings(rounds: int = 3) -> Ceilings:
    """The ceilings by a bfloat16 product of size 8192 on an accelerator, a float32 one of size 1024
    on a CPU, the best of the rounds; of random numbers, since zeros run faster."""
    is_cpu = jax.default_backend() == "cpu"
    size, dtype = (1024, jnp.float32) if is_cpu else (8192, jnp.bfloat16)
    matrix = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product, copy = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)
    calls = {"product": lambda: product(matrix, matrix), "copy": lambda: copy(matrix)}
    single = [median_seconds(calls, 1) for _ in range(rounds)]
    least = {name: min(seconds[name] for seconds in single) for name in calls}
    return Ceilings(2 * size**3 / least["product"], 2 * matrix.nbytes / least["copy"])


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Peak bytes a compiled program needs besides its arguments and results."""
    stats = compiled.memory_analysis()
    assert stats is not None, "this backend's compiler reports no bytes"
    return stats.temp_size_in_bytes


def needed_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of a run on the device: arguments, results (donated ones count once), temporaries."""
    stats: Any = compiled.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return temp_bytes(compiled) + stats.argument_size_in_bytes + results


def usable_bytes() -> int:
    """Bytes a program may take: those free on the accelerator, or half of the host's."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def environment() -> dict[str, Any]:
    """Device, versions and commit, which a reported number has to name; clocks and power limit as
    the driver of a GPU reports them. The commit is marked `-dirty` after edits."""
    device, folder = jax.devices()[0], str(Path(__file__).parent)
    clocks = _output("nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader", "--id=0")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "commit": _output("git", "-C", folder, "describe", "--always", "--dirty"),
        "clocks": None if clocks is None else f"{_CLOCKS}: {clocks}",
    }


def _output(*command: str) -> str | None:
    """Standard output of a command; None where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def over(value: float | None, unit: float | None) -> float | None:
    """The value in this unit, or relative to a baseline; None where either was not measured."""
    return None if value is None or unit is None else value / unit
