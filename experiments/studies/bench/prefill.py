"""Prefills of long prompts in pieces from an empty state, and greedy decoding after them: several
methods in one shape, on random tokens."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from ttcd_kernels import measure
from ttcd_kernels.measure import MIB, MILLISECOND, Row, over

from experiments.studies.bench.case import Case, loaded, why_not_run
from experiments.studies.bench.models import Competitor, Models
from ttcd_jax.config import NonNegativeFloat, Positive
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.prefill import MemoryMode, even_size, prefill, read_piece
from ttcd_jax.inference.state import InferenceState, start_state
from ttcd_jax.models.config import TransformerConfig, has_in_place_memory
from ttcd_jax.train.flops import forward_flops

BASELINES = ("swa", "ipttt")  # their times and FLOPs are divisors
# Largest difference of the naive form's logits from the fused one's over the largest logit.
BOUNDS = {
    "float32": 1e-3,  # an accelerator multiplies float32 in fewer bits by default
    "bfloat16": 5e-2,  # every layer rounds anew
}

_SMALL = ("vocab_size=64", "dim=16", "num_layers=1", "head_dim=8", "mlp_dim=32")
_PARAM = (*(f"TransformerConfig.{binding}" for binding in _SMALL), "MemoryConfig.chunk_size=8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill(Case):
    """Rows of `lengths` tokens under the teacher's `windows`; the student's are half. A table per
    window, batch size and length."""

    gin: str = "prefill/default.gin"
    param: tuple[str, ...] = ()
    models: tuple[Competitor, ...] = ("swa", "ipttt", "ipttcd_naive", "ipttcd")
    lengths: tuple[Positive, ...] = (65536, 262144)
    batch_sizes: tuple[Positive, ...] = (1, 4)
    windows: tuple[Positive, ...] = (2048, 8192, 16384)
    piece_size: Positive | None = None
    rounds: Positive = 5
    max_seconds: NonNegativeFloat = 120

    quick: ClassVar[Row] = {"gin": "prefill/cpu.gin", "param": _PARAM, "lengths": (32, 64)}
    quick |= {"batch_sizes": (2,), "windows": (8,), "piece_size": 16, "rounds": 1}

    def settings(self) -> Iterator[tuple[dict[str, InferenceModel], int, int]]:
        built = Models(loaded(TransformerConfig, self.gin, self.param))
        for window in self.windows:
            models = {name: built.build(name, window) for name in self.models}
            for batch_size, length in itertools.product(self.batch_sizes, self.lengths):
                yield models, batch_size, length

    def tables(self) -> Iterator[list[Row]]:
        for models, batch_size, length in self.settings():
            make = functools.partial(_Reading, batch_size=batch_size, length=length, options=self)
            reads = {name: make(model) for name, model in models.items()}
            calls = {name: reading for name, reading in reads.items() if not reading.row["note"]}
            logits = {name: reading.logits for name, reading in calls.items()}
            seconds = measure.median_seconds(calls, self.rounds)
            rows = []
            for name, model in models.items():
                time = seconds.get(name)
                row = {"model": name} | reads[name].row | {"ms": over(time, MILLISECOND)}
                row["tokens/s"] = over(batch_size * length, time)
                for base in BASELINES:
                    floor = over(reads[name].flops, reads[base].flops if base in reads else None)
                    ratio = over(time, seconds.get(base))
                    row |= {f"/ {base}": ratio, f"FLOPs / {base}": floor}
                    row[f"beyond {base} %"] = 100 * (ratio / floor - 1) if ratio and floor else None
                rows.append(row | checked(name, logits, model.config.precision.compute))
            yield rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Prefill):
    """A timed round decodes `steps` tokens of every row after prompts of `lengths` tokens: a row
    per model, and one for its memory off while decoding ("published"). Models run one after
    another: two states may not fit at once."""

    models: tuple[Competitor, ...] = ("swa", "ipttt", "ipttcd")
    lengths: tuple[Positive, ...] = (8192,)
    batch_sizes: tuple[Positive, ...] = (1, 2, 4, 8, 16, 32, 64)
    windows: tuple[Positive, ...] = (8192,)
    steps: Positive = 64

    quick: ClassVar[Row] = Prefill.quick | {"lengths": (16,), "steps": 2}

    def tables(self) -> Iterator[list[Row]]:
        for models, batch_size, length in self.settings():
            rows: list[Row] = []
            for name, model in models.items():
                read = _Reading(model, batch_size, length, self)
                modes = get_args(MemoryMode) if has_in_place_memory(model.config) else ("kept",)
                for memory in modes:
                    time = None if read.row["note"] else self._seconds_of_step(read, memory)
                    row = {"model": name, "memory": memory} | read.row
                    row["ms a step"] = over(time, MILLISECOND)
                    rows.append(row | {"tokens/s": over(batch_size, time)})
            base = next((row["ms a step"] for row in rows if row["model"] == "swa"), None)
            yield [row | {"/ swa": over(row["ms a step"], base)} for row in rows]

    def _seconds_of_step(self, read: "_Reading", memory: MemoryMode) -> float:
        logits, state = read()

        def decoded() -> jax.Array:
            nonlocal logits, state
            for _ in range(self.steps):
                logits, state = decode(read.model, state, _greedy(logits), memory=memory)
            return logits

        return measure.median_seconds({"steps": decoded}, self.rounds)["steps"] / self.steps


def prefill_flops(config: TransformerConfig, length: int) -> float:
    """FLOPs of reading a row, logits of its last token only."""
    return forward_flops(config, length) - 2 * (length - 1) * config.dim * config.vocab_size


class _Reading:
    """Random rows, which a call reads into an empty state: (logits, state). `row` has sizes and, if
    they cannot be read, a note; else `logits` is set. Program bytes are the compiler's for a piece
    after a full window, parameters and state included."""

    def __init__(
        self, model: InferenceModel, batch_size: int, length: int, options: Prefill
    ) -> None:
        config, shape = model.config, (batch_size, length)
        self.model, self._piece_size = model, options.piece_size
        self._tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)
        self.flops = batch_size * prefill_flops(config, length)
        self.row: Row = {"rows": batch_size, "tokens": length, "window": config.window}
        self.row |= {"state MiB": None, "program MiB": None}
        try:
            state = start_state(model, batch_size)
            self.row["state MiB"] = _bytes(state) / MIB
            program = self._program_bytes(state)
            self.row["program MiB"] = program / MIB
            needed = program - _bytes(model) - _bytes(state)
            self.row["note"] = why_not_run(needed, self.flops, options.max_seconds)
            del state
            if not self.row["note"]:
                self.logits = np.asarray(self()[0], np.float32)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.row["note"] = f"out of memory: {str(error).splitlines()[0][:100]}"

    def __call__(self) -> Any:
        state = start_state(self.model, len(self._tokens))
        return prefill(self.model, state, self._tokens, piece_size=self._piece_size)

    def _program_bytes(self, state: InferenceState) -> int:
        window, (B, length) = self.model.config.window, self._tokens.shape
        assert window is not None
        size = even_size(self.model.config, length, self._piece_size)
        tokens = jax.ShapeDtypeStruct((B, size), jnp.int32)
        lengths = jax.ShapeDtypeStruct((B,), jnp.int32)
        seen: Any = {"halo": window - 1, "has_gap": False}
        lowered = read_piece.lower(self.model, state, tokens, lengths, **seen)
        return measure.needed_bytes(lowered.compile())


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def checked(name: str, logits: dict[str, np.ndarray], compute: str) -> Row:
    """A model's distance from its fused form, and a note that fails the benchmark where that is too
    large or not finite."""
    naive, fused = logits.get(name), logits.get(name.removesuffix("_naive"))
    if naive is None or fused is None:
        return {"distance": None}
    distance, bound = float(np.abs(naive - fused).max() / np.abs(fused).max()), BOUNDS[compute]
    note = f"{measure.FAILED}{distance:.1e} from the fused form, the bound is {bound:.0e}"
    return {"distance": distance} | ({} if distance <= bound else {"note": note})


@jax.jit
def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
