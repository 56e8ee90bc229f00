"""Our training step beside that of the authors' PyTorch code on this CPU: the same weights in the
format of `experiments.convert`, the same tokens, the same optimizer, one step of each in turn.

Every program is a process of its own. Their losses of the first steps must agree with ours, or
nothing is timed.
"""

import contextlib
import dataclasses
import functools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from ttcd_kernels import measure
from ttcd_kernels.measure import MIB, MILLISECOND, Row

from experiments import cli
from experiments.bench import step
from experiments.bench.frame import Case
from experiments.gin_loading import load_config
from ttcd_jax.config import DISTINCT, Config, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.files import read_json, write_json
from ttcd_jax.interop.reference_checkpoint import CONFIG, export_reference
from ttcd_jax.interop.weight_files import write_safetensors
from ttcd_jax.methods.in_place import InPlaceSettings
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.state import init_params

CHECKED_STEPS, TOLERANCE = 3, 1e-5  # of a loss, relative to ours
_ALONE = "--authors=CHECKOUT --python=PATH time the authors' step beside ours"
_RUN = "run.json"


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
    """A process that takes a step for every line it is sent and answers with the loss; its losses,
    and seconds and page faults of its steps."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self._name, self._process, self._log = name, process, log
        self._answer()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.faults: list[int] = []

    def take(self) -> None:
        faults, start = self._faults(), time.perf_counter()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, as its answer tells
            print(file=self._process.stdin, flush=True)
        self.losses.append(float(self._answer()))
        self.seconds.append(time.perf_counter() - start)
        self.faults.append(self._faults() - faults)

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def _faults(self) -> int:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[7])

    def _answer(self) -> str:
        """The next line. Raises `UserError` with the last line of the log if there is none."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        reason = self._log.read_text().strip().rpartition("\n")[2]
        raise UserError(f"the program {self._name!r} ended: {reason or 'without a message'}")


def measured(options: Peer) -> Iterator[list[Row]]:
    """A table per model. "/ ours" is relative to our step; faults are the median's."""
    config = load_config(RunConfig, options.gin, options.param, config_dir=cli.CONFIG_DIR)
    if config.model.method != "ipttcd":
        raise UserError(
            f"{options.gin} has a model of method {config.model.method!r}, not 'ipttcd'"
        )
    if options.authors is not None and not Path(options.authors, "custom_models").is_dir():
        raise UserError(f"--authors={options.authors}: no folder custom_models is in it")
    for name in options.models:
        run = config.replace(model=_model(config.model, name))
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            programs = _started(run, options, Path(folder), stack)
            yield _rows(name, programs, options.rounds)


def _model(shape: TransformerConfig, name: str) -> TransformerConfig:
    if name == "ipttcd":
        return shape
    if name == "swa":
        return shape.replace(method=name, fast_layers=(), memory=None)
    assert isinstance(shape.settings, InPlaceSettings)
    memory = TargetMemoryConfig(
        chunk_size=shape.settings.chunk_size, target="embedding", conv_init="normal"
    )
    return shape.replace(method=name, memory=memory)


def _started(
    config: RunConfig, options: Peer, folder: Path, stack: contextlib.ExitStack
) -> dict[str, _Program]:
    """The programs, ours first, each ready for its first step."""
    write_json(folder / _RUN, config.to_dict())
    commands = {"ours": [sys.executable, "-m", "experiments.bench.peer", str(folder)]}
    if options.authors is not None:
        _write_for_theirs(config, folder)
        script = str(Path(__file__).with_name("peer_torch.py"))
        for mode in options.modes:
            command = [options.python, script, options.authors, str(folder), mode]
            commands[f"theirs, {mode}"] = command
    programs = {}
    for name, command in commands.items():
        log = folder / f"{name}.log"
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(log.open("w")),
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        programs[name] = _Program(name, stack.enter_context(process), log)
    return programs


def _write_for_theirs(config: RunConfig, folder: Path) -> None:
    params = jax.jit(functools.partial(init_params, config.model, config.seed))()
    tensors, text = export_reference(params, config.model)
    write_safetensors(folder, tensors)
    (folder / CONFIG).write_text(text)
    np.save(folder / "tokens.npy", step.random_tokens(config))
    ours = config.optimizer
    recipe = {"lr": ours.schedule.peak, "betas": (ours.beta1, ours.beta2), "eps": ours.eps}
    recipe |= {"weight_decay": ours.weight_decay}
    clip, threads = ours.clip_norm or math.inf, len(os.sched_getaffinity(0))
    write_json(folder / "recipe.json", {"adamw": recipe, "clip_norm": clip, "threads": threads})


def _rows(model: str, programs: dict[str, _Program], rounds: int) -> list[Row]:
    ours, *theirs = programs.values()
    for _ in range(CHECKED_STEPS):
        for program in programs.values():
            program.take()
    notes = {name: _disagreement(program, ours) for name, program in programs.items()}
    if not theirs:
        notes["ours"] = _ALONE
    is_timed = not any(note.startswith(measure.FAILED) for note in notes.values())
    for _ in range(rounds if is_timed else 0):
        for program in programs.values():
            program.take()
    return [
        {"model": model, "program": name, **_measures(program, ours), "note": notes[name]}
        for name, program in programs.items()
    ]


def _disagreement(program: _Program, ours: _Program) -> str:
    for number, (loss, own) in enumerate(zip(program.losses, ours.losses, strict=True), 1):
        if not abs(loss - own) <= TOLERANCE * abs(own):
            found = f"the loss of step {number} is {loss:.7g}, ours {own:.7g}"
            return f"{measure.FAILED}{found}, the bound is {TOLERANCE:g} of it: nothing is timed"
    return ""


def _measures(program: _Program, ours: _Program) -> Row:
    """The columns of one program; None where nothing was timed."""
    seconds, base = (x.seconds[CHECKED_STEPS:] for x in (program, ours))
    names = ("min ms", "median ms", "min / ours", "median / ours", "faults", "RSS MiB")
    if not seconds:
        return dict.fromkeys(names)
    least, middle = min(seconds), statistics.median(seconds)
    values = [least / MILLISECOND, middle / MILLISECOND]
    values += [least / min(base), middle / statistics.median(base)]
    values += [statistics.median(program.faults[CHECKED_STEPS:]), program.peak_bytes() / MIB]
    return dict(zip(names, values, strict=True))


def _serve(folder: Path) -> None:
    """Our program."""
    config: Any = RunConfig.from_dict(read_json(folder / _RUN))
    out, sys.stdout = sys.stdout, sys.stderr
    run = step.Run(config)
    print("ready", file=out, flush=True)
    for _ in sys.stdin:
        metrics = run.take()
        jax.block_until_ready(run.state)
        print(float(metrics["loss"]), file=out, flush=True)


_SIZES = ("vocab_size=64", "dim=16", "num_layers=2", "num_heads=2", "head_dim=8", "mlp_dim=32")
_WINDOWS = ("window=16", "student_window=8", "fast_layers=(0,)")
_SMALL = tuple(f"TransformerConfig.{binding}" for binding in _SIZES + _WINDOWS)
_SMALL += ("MemoryConfig.chunk_size=8", "BatchesConfig.seq_len=32", "RunConfig.batch_size=2")
CASES = {"peer": Case(Peer, {"param": _SMALL, "rounds": 1}, measured)}

if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
