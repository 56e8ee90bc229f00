"""Our training step and that of the authors' PyTorch code on this CPU: the same weights in the
format of `experiments.convert`, the same tokens, the same AdamW, one step of each in turn.

Every program is a process of its own. Their losses of the first steps must agree with ours, or
nothing is timed.
"""

import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from ttcd_kernels.measure import MIB, MILLISECOND, Row

from experiments import cli
from experiments.bench import step
from experiments.bench.frame import Case
from experiments.bench.models import of_method
from experiments.gin_loading import load_config
from ttcd_jax.config import DISTINCT, Config, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.files import read_json, write_json
from ttcd_jax.interop.reference_checkpoint import CONFIG, export_reference
from ttcd_jax.interop.weight_files import write_safetensors
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.state import init_params

CHECKED_STEPS, TOLERANCE = 3, 1e-5  # of a loss, relative to ours
_ALONE = "--authors=CHECKOUT --python=PATH time the authors' step as well"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer(Config):
    """The shape of `models` is that of the IP-TTCD model in `gin`. `authors`: a checkout of their
    repository. `python`: an interpreter with its packages (torch, triton, transformers, einops).
    `modes`: how PyTorch runs it."""

    gin: str = "peer.gin"
    param: tuple[str, ...] = ()
    models: Annotated[tuple[Literal["ipttcd", "swa", "ipttt"], ...], DISTINCT] = ("ipttcd", "swa")
    authors: str | None = None
    python: str = sys.executable
    modes: Annotated[tuple[Literal["eager", "compiled"], ...], DISTINCT] = ("eager",)
    rounds: Positive = 7


class _Program:
    """A process that takes a step for every line it is sent and answers with the loss."""

    def __init__(self, name: str, command: list[str], log: Path, stack: ExitStack) -> None:
        self.name, self._log, pipe = name, log, subprocess.PIPE
        errors, environment = log.open("w"), os.environ | {"JAX_PLATFORMS": "cpu"}
        options: Any = {"stderr": stack.enter_context(errors), "env": environment, "bufsize": 0}
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, **options)
        self._process: Any = stack.enter_context(process)
        self._answer()

    def take(self) -> tuple[float, float, int]:
        """(loss, seconds, page faults) of a step."""
        faults, start = self._fact("stat", ") ", 7), time.perf_counter()
        with suppress(BrokenPipeError):  # it ended: `_answer` raises
            self._process.stdin.write(b"\n")
        loss, seconds = float(self._answer()), time.perf_counter() - start
        return loss, seconds, self._fact("stat", ") ", 7) - faults

    def peak_bytes(self) -> int:
        return 1024 * self._fact("status", "VmHWM:", 0)

    def _fact(self, file: str, start: str, index: int) -> int:
        """A number of the process in /proc: word `index` after the last `start` of the file."""
        text = Path(f"/proc/{self._process.pid}/{file}").read_text()
        return int(text.rpartition(start)[2].split()[index])

    def _answer(self) -> bytes:
        """The next line. Raises `UserError` with the last line of the log if there is none."""
        if line := self._process.stdout.readline():
            return line
        reason = self._log.read_text().strip().rpartition("\n")[2] or "without a message"
        raise UserError(f"the program {self.name!r} ended: {reason}; see --authors and --python")


def measured(options: Peer) -> Iterator[list[Row]]:
    """A table per model. "/ ours" is relative to our step; "faults" is their median."""
    config = load_config(RunConfig, options.gin, options.param, config_dir=cli.CONFIG_DIR)
    for name in options.models:
        run = config.replace(model=of_method(config.model, name))
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            programs = [
                _Program(name, command, Path(folder, name), stack)
                for name, command in _commands(run, options, Path(folder)).items()
            ]
            yield [{"model": name} | row for row in _rows(programs, options.rounds)]


def _commands(config: RunConfig, options: Peer, folder: Path) -> dict[str, list[str]]:
    """The programs, ours first; `folder` is filled with what they read."""
    write_json(folder / "run.json", config.to_dict())
    ours = [sys.executable, "-m", "experiments.bench.peer", str(folder)]
    if options.authors is None:
        return {"ours": ours}
    params = jax.jit(functools.partial(init_params, config.model, config.seed))()
    tensors, text = export_reference(params, config.model)
    write_safetensors(folder, tensors)
    (folder / CONFIG).write_text(text)
    np.save(folder / "tokens.npy", step.random_tokens(config))
    script = str(Path(__file__).with_name("peer_torch.py"))
    theirs = [options.python, script, options.authors, str(folder)]
    return {"ours": ours} | {f"theirs, {mode}": [*theirs, mode] for mode in options.modes}


def _rows(programs: list[_Program], rounds: int) -> list[Row]:
    """A row per program. Raises `UserError` for a loss that differs from ours."""
    for number in range(1, CHECKED_STEPS + 1):
        own, *losses = (program.take()[0] for program in programs)
        for program, loss in zip(programs[1:], losses, strict=True):
            if not abs(loss - own) <= TOLERANCE * abs(own):
                found = f"step {number} of {program.name!r} has loss {loss:.7g}, ours {own:.7g}"
                raise UserError(f"{found}: nothing is timed above a difference of {TOLERANCE:g}")
    taken = [[program.take() for program in programs] for _ in range(rounds)]
    note, rows = "" if len(programs) > 1 else _ALONE, []
    for program, steps in zip(programs, zip(*taken, strict=True), strict=True):
        _, seconds, faults = zip(*steps, strict=True)
        row: Row = {"program": program.name}
        for name, choice in {"min": min, "median": statistics.median}.items():
            value, ours = choice(seconds), choice([first[1] for first, *_ in taken])
            row |= {f"{name} ms": value / MILLISECOND, f"{name} / ours": value / ours}
        row |= {"faults": statistics.median(faults), "RSS MiB": program.peak_bytes() / MIB}
        rows.append(row | {"note": note})
    return rows


def _serve(folder: Path) -> None:
    """Our program."""
    run = step.Run(RunConfig.from_dict(read_json(folder / "run.json")))
    print("ready", flush=True)
    for _ in sys.stdin:
        loss = run.take()["loss"]
        jax.block_until_ready(run.state)
        print(float(loss), flush=True)


CASES = {"peer": Case(Peer, {"gin": "recall.gin", "param": step.SMALL, "rounds": 1}, measured)}

if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
