"""What the benchmarks share: interleaved timing, compiled memory, the machine, a table."""

import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

_MIN_SAMPLE_SECONDS = 0.02  # shorter programs are called several times per sample
_MAX_CALLS = 50


def median_seconds[Name: Hashable](
    programs: Mapping[Name, Callable[[], Any]], rounds: int
) -> dict[Name, float]:
    """Seconds per call of each program: the median of `rounds` rounds, each of which times every
    program in turn, so that a machine shared with others slows all of them alike."""
    calls = {}
    for name, program in programs.items():
        first = _seconds(program, 1)  # the warm-up, too
        calls[name] = min(max(math.ceil(_MIN_SAMPLE_SECONDS / first), 1), _MAX_CALLS)
    samples: dict[Name, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            samples[name].append(_seconds(program, calls[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def _seconds(program: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = program()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Peak bytes a compiled program needs beside its arguments and results."""
    return _memory(compiled).temp_size_in_bytes


def needed_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of a run: arguments, results and temporaries."""
    memory = _memory(compiled)
    sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    return sum(sizes)


def _memory(compiled: jax.stages.Compiled):
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend's compiler reports no memory"
    return memory


def usable_bytes() -> int:
    """Memory a program may take: what the accelerator has left, or half of the host's."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def environment() -> dict[str, Any]:
    """Device, versions and commit: what a reported number has to name."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the source tree, marked `-dirty` after edits; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    padded = (zip(line, widths, strict=True) for line in lines)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in padded
    )
