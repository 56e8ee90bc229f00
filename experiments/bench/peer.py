"""Our training step, prefill or decoding and that of the authors' PyTorch code on this CPU: the
same weights in the format of `experiments.convert`, the same tokens, the same AdamW, in turn.

Every program is a process of its own. The losses of their first steps must agree with ours and
their greedy tokens be the same, or nothing is timed.
"""

import dataclasses
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
from experiments.bench.prefill import continuation, greedy, modes
from experiments.gin_loading import load_config
from ttcd_jax.config import DISTINCT, Config, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.files import read_json, write_json
from ttcd_jax.inference.model import inference_model
from ttcd_jax.inference.prefill import prefill
from ttcd_jax.inference.state import start_state
from ttcd_jax.interop.reference_checkpoint import CONFIG, export_reference
from ttcd_jax.interop.weight_files import write_safetensors
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.state import init_params, with_params

CHECKED, TOLERANCE = 3, 1e-5  # of a loss, relative to ours
_RESULTS = {"step": "loss", "prefill": "next token", "decode": "token"}
_ALONE = "--authors=CHECKOUT --python=PATH time the authors' code as well"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer(Config):
    """The shape of `models` is that of the IP-TTCD model in `gin`. `work`: what is timed, a step of
    a batch, reading its rows as prompts, or decoding `tokens` tokens behind each. `authors`: a
    checkout of their repository. `python`: an interpreter with its packages (torch, triton,
    transformers, einops). `modes`: how PyTorch runs it."""

    gin: str = "peer.gin"
    param: tuple[str, ...] = ()
    models: Annotated[tuple[Literal["ipttcd", "swa", "ipttt"], ...], DISTINCT] = ("ipttcd", "swa")
    work: Literal["step", "prefill", "decode"] = "step"
    tokens: Positive = 100
    authors: str | None = None
    python: str = sys.executable
    modes: Annotated[tuple[Literal["eager", "compiled"], ...], DISTINCT] = ("eager",)
    rounds: Positive = 7


class _Program:
    """A process that does its work once for every line it is sent and answers with the results."""

    def __init__(self, name: str, command: list[str], log: Path, stack: ExitStack) -> None:
        self.name, self._log, pipe = name, log, subprocess.PIPE
        errors, environment = log.open("w"), os.environ | {"JAX_PLATFORMS": "cpu"}
        options: Any = {"stderr": stack.enter_context(errors), "env": environment, "bufsize": 0}
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, **options)
        self._process: Any = stack.enter_context(process)
        self._answer()

    def take(self) -> tuple[np.ndarray, float, int]:
        """(results, seconds, page faults)."""
        faults, start = self._fact("stat", ") ", 7), time.perf_counter()
        with suppress(BrokenPipeError):  # it ended: `_answer` raises
            self._process.stdin.write(b"\n")
        answer, seconds = self._answer(), time.perf_counter() - start
        return np.array(answer.split(), float), seconds, self._fact("stat", ") ", 7) - faults

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
    """A table per model. "/ ours" is relative to our time; tokens per second and "faults" are
    medians."""
    config = load_config(RunConfig, options.gin, options.param, config_dir=cli.CONFIG_DIR)
    for name in options.models:
        run = config.replace(model=of_method(config.model, name))
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            programs = [
                _Program(name, command, Path(folder, name), stack)
                for name, command in _commands(run, options, Path(folder)).items()
            ]
            tokens = options.tokens if options.work == "decode" else config.data.seq_len
            shape: Row = {"model": name, "work": options.work, "rows": config.batch_size}
            rows = _rows(programs, options, config.batch_size * tokens)
            yield [shape | {"tokens": config.data.seq_len} | row for row in rows]


def _commands(config: RunConfig, options: Peer, folder: Path) -> dict[str, list[str]]:
    """The programs, ours first; `folder` is filled with what they read."""
    write_json(folder / "run.json", config.to_dict())
    arguments = [str(folder), options.work, str(options.tokens)]
    ours = [sys.executable, "-m", "experiments.bench.peer", *arguments]
    # The authors' memory is off while decoding: ours is too where tokens are compared.
    *others, compared = modes(config.model) if options.work == "decode" else ("kept",)
    commands = {"ours": [*ours, compared]}
    commands |= {f"ours, memory {memory}": [*ours, memory] for memory in others}
    if options.authors is None:
        return commands
    tensors, text = export_reference(_params(config), config.model)
    write_safetensors(folder, tensors)
    (folder / CONFIG).write_text(text)
    np.save(folder / "tokens.npy", step.random_tokens(config))
    script = str(Path(__file__).with_name("peer_torch.py"))
    theirs = [options.python, script, options.authors, *arguments]
    return commands | {f"theirs, {mode}": [*theirs, mode] for mode in options.modes}


def _rows(programs: list[_Program], options: Peer, num_tokens: int) -> list[Row]:
    """A row per program. Raises `UserError` for a result of theirs that differs from ours."""
    bound = TOLERANCE if options.work == "step" else 0
    for number in range(1, CHECKED + 1):
        own, *others = (program.take()[0] for program in programs)
        for program, found in zip(programs[1:], others, strict=True):
            wrong = ~(np.abs(found - own) <= bound * np.abs(own))
            if program.name.startswith("theirs") and wrong.any():
                pair = f"{found[wrong][0]:.7g}, ours {own[wrong][0]:.7g}"
                text = f"{options.work} {number} of {program.name!r} has {_RESULTS[options.work]} "
                raise UserError(f"{text}{pair}: nothing is timed above a difference of {bound:g}")
    taken = [[program.take() for program in programs] for _ in range(options.rounds)]
    note, rows = "" if options.authors else _ALONE, []
    for program, steps in zip(programs, zip(*taken, strict=True), strict=True):
        _, seconds, faults = zip(*steps, strict=True)
        row: Row = {"program": program.name}
        for name, choice in {"min": min, "median": statistics.median}.items():
            value, ours = choice(seconds), choice([first[1] for first, *_ in taken])
            row |= {f"{name} ms": value / MILLISECOND, f"{name} / ours": value / ours}
        row["tokens/s"] = num_tokens / statistics.median(seconds)
        row |= {"faults": statistics.median(faults), "RSS MiB": program.peak_bytes() / MIB}
        rows.append(row | {"note": note})
    return rows


def _params(config: RunConfig) -> Any:
    return jax.jit(functools.partial(init_params, config.model, config.seed))()


def _serve(folder: str, work: str, num_tokens: str, memory: Any) -> None:
    """Our program."""
    config = RunConfig.from_dict(read_json(Path(folder, "run.json")))
    take = _step(config) if work == "step" else _inference(config, work, int(num_tokens), memory)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(*take(), flush=True)


def _step(config: RunConfig) -> Callable[[], list[Any]]:
    run = step.Run(config)
    return lambda: [float(jax.block_until_ready((run.take()["loss"], run.state))[0])]


def _inference(config: RunConfig, work: str, num_tokens: int, memory: Any) -> Callable[[], Any]:
    model = inference_model(with_params(config.model, _params(config)))
    prompts = step.random_tokens(config)[:, :-1]

    def read() -> Any:
        return jax.block_until_ready(prefill(model, start_state(model, len(prompts)), prompts))

    if work == "prefill":
        return lambda: np.asarray(greedy(read()[0]))
    logits, state = read()
    tokens = continuation(model, logits, state, memory)
    return lambda: np.ravel([*map(np.asarray, itertools.islice(tokens, num_tokens))])


_SMALL = (*step.SMALL, "MemoryConfig.corrects_errors=False")  # as the authors' model
CASES = {"peer": Case(Peer, {"gin": "recall.gin", "param": _SMALL, "rounds": 1}, measured)}

if __name__ == "__main__":
    _serve(*sys.argv[1:])
