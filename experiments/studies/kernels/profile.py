"""Where the time of a model's training step goes: the kernels of a GPU (threads of a CPU) by time,
out of a trace of JAX's profiler."""

import collections
import gzip
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from ttcd_kernels.measure import Row

_STEPS, _SHOWN = 2, 40


def kernels(step: Callable[[], Any]) -> list[tuple[str, str, float]]:
    """`by_time` of a step, which has run before."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_STEPS):
                jax.block_until_ready(step())
        (file,) = Path(folder).rglob("*.trace.json.gz")
        return by_time(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"], _STEPS)


def by_time(events: Sequence[Row], steps: int) -> list[tuple[str, str, float]]:
    """(kernel, the operation of the program that it belongs to, milliseconds a step) of the longest
    ones, after the sum of all."""
    named = [event for event in events if event.get("name") in ("process_name", "thread_name")]
    names = {(x["name"], x["pid"], x.get("tid", 0)): x["args"]["name"] for x in named}
    gpus = {pid for (kind, pid, _), name in names.items() if kind[0] == "p" and "GPU" in name}
    spent: collections.Counter[tuple[str, str]] = collections.Counter()
    for event in events:
        facts = event.get("args", {})
        is_stream = "Stream" in names.get(("thread_name", event.get("pid"), event.get("tid")), "")
        is_kernel = event.get("pid") in gpus and is_stream if gpus else "hlo_op" in facts
        if event.get("ph") == "X" and is_kernel:
            place = facts.get("name") or facts.get("tf_op") or facts.get("hlo_op", "")
            spent[event["name"][:80], place[-100:]] += event["dur"]
    scale = 1e3 * steps
    rows = [(*key, value / scale) for key, value in spent.most_common(_SHOWN)]
    return [("all", "", spent.total() / scale), *rows]
