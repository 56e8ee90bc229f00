"""A command in float64, with faults that its own process injects: `program.py FAULTS COMMAND ...`.

FAULTS is JSON, a list of [the name of a function of this module, its arguments ...].
"""

import json
import os
import pkgutil
import random
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

# What is called at a moment: a method, or a function of a module.
MOMENTS = {
    "start": ("ttcd_jax.run.bindings", "load_config"),
    "claim": ("pathlib:Path", "replace"),
    "restore": ("ttcd_jax.train.checkpoint:Checkpoints", "restore"),
    "step": ("ttcd_jax.train.watchdog:Watchdog", "beat"),
    "save": ("ttcd_jax.train.checkpoint:Checkpoints", "save"),
    "seal": ("ttcd_jax.train.digest", "seal"),
    "evaluation": ("ttcd_jax.tasks.perplexity:Perplexity", "series"),
}


def signals(moment: str, count: int, delay: float, *names: str) -> None:
    """Sends this process signals so many seconds after the `count`-th time of a moment."""

    def send() -> None:
        time.sleep(delay)
        for name in names:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.02 if name != names[-1] else 0)

    _at(moment, count, lambda: threading.Thread(target=send).start() if delay else send())


def fails(count: int, error: str, text: str) -> None:
    """Raises an error after the `count`-th step."""

    def fail() -> None:
        raise pkgutil.resolve_name(error)(text)

    _at("step", count, fail)


def clock(seed: int) -> None:
    """Makes Python's clock jump."""
    now, rng = time.time, random.Random(seed)
    time.time = lambda: now() + rng.uniform(-1e5, 1e5)


def full_disk(size: int) -> None:
    """Limits the size of files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def notes_rows(path: str) -> None:
    """Appends step, number and digest of every row that this process trains on to a file."""
    batches = pkgutil.resolve_name("ttcd_jax.data.pipeline:Batches")
    iterate = batches.iterate

    def noted(self: Any, *steps: int) -> Iterator[Any]:
        for step, fields in iterate(self, *steps):
            rows = zip(self._rows, fields["tokens"], strict=True)
            lines = (f"{step} {row} {sha256(tokens).hexdigest()}\n" for row, tokens in rows)
            with open(path, "a") as file:
                file.write("".join(lines))
            yield step, fields

    batches.iterate = noted


def reseeded() -> None:
    """Trains on other batches."""
    build = pkgutil.resolve_name("ttcd_jax.run.build")
    make = build.build_data
    build.build_data = lambda config, *rest: make(config.replace(seed=1), *rest)


def _at(moment: str, count: int, act: Callable[[], None]) -> None:
    calls = []

    def note() -> None:
        calls.append(None)
        if len(calls) == count:
            act()

    def traced(event: str, seconds: float, **options: Any) -> None:
        if event.endswith("jaxpr_to_mlir_module_duration") and "train_step" in options["fun_name"]:
            note()

    if moment == "compilation":
        pkgutil.resolve_name("jax.monitoring").register_event_duration_secs_listener(traced)
        return
    owner, name = pkgutil.resolve_name(MOMENTS[moment][0]), MOMENTS[moment][1]
    call = getattr(owner, name)

    def noted(*arguments: Any, **options: Any) -> Any:
        note()
        return call(*arguments, **options)

    setattr(owner, name, noted)


def main() -> None:
    import jax

    faults, command, *arguments = sys.argv[1:]
    jax.config.update("jax_enable_x64", True)
    for name, *values in json.loads(faults):
        globals()[name](*values)
    sys.argv[1:] = arguments
    runpy.run_module(f"experiments.{command}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
