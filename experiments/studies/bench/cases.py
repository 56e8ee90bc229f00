"""The cases of the benchmark: training steps of several configurations on random tokens and their
input pipelines; prefills of long prompts in pieces from an empty state, and greedy decoding after
them, by several methods in one shape, on random tokens.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from ttcd_kernels import measure
from ttcd_kernels.measure import MIB, MILLISECOND, Row, over

from experiments.studies.kernels.programs import turn
from ttcd_jax.commands.cli import CONFIG_DIR
from ttcd_jax.commands.plan import PEAK_SHARE
from ttcd_jax.config import DISTINCT, Config, NonNegative, NonNegativeFloat, Positive
from ttcd_jax.data.pipeline import CallerBatches
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.inference.prefill import MemoryMode, even_size, prefill, read_piece
from ttcd_jax.inference.state import InferenceState, start_state
from ttcd_jax.methods.in_place import InPlaceSettings
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.models.config import (
    TransformerConfig,
    forward_flops,
    has_in_place_memory,
    training_flops_per_token,
)
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.build import Program, build_data
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.hardware import data_sheet, parse_topology
from ttcd_jax.train.state import init_params, num_params, with_params

BASELINES = ("swa", "ipttt")  # their times and FLOPs are divisors
_SMALL_STEP = ("RunConfig.batch_size=2", "TransformerConfig.dim=8", "RecallConfig.num_slots=8")
_SMALL = ("vocab_size=64", "dim=16", "num_layers=1", "head_dim=8", "mlp_dim=32")
_SMALL_PROMPT = (*(f"TransformerConfig.{x}" for x in _SMALL), "MemoryConfig.chunk_size=8")
Competitor = Literal["swa", "ipttt", "ipttcd"]
_ceilings = functools.cache(measure.ceilings)


class Step(Config):
    """A row per file of `gin`, with `param` of all. "time" and "FLOPs" are per token, over those of
    the first file; memory is that of the compiled step, the state included."""

    gin: Annotated[tuple[str, ...], DISTINCT] = ()
    param: tuple[str, ...] = ()
    rounds: Positive = 5

    # Values of fields under --quick.
    quick: ClassVar[Row] = {"gin": ("recall.gin", "recall_swa.gin"), "rounds": 1}
    quick |= {"param": _SMALL_STEP}

    def configs(self) -> dict[str, RunConfig]:
        load = functools.partial(load_config, RunConfig, params=self.param, config_dir=CONFIG_DIR)
        return {gin: load(gin) for gin in self.gin}

    def tables(self) -> Iterator[list[Row]]:
        """Measures and gives the tables, one after another."""
        configs = self.configs()
        steps = {gin: random_step(config) for gin, config in configs.items()}
        with turn():
            seconds = measure.median_seconds({gin: x for gin, (x, _) in steps.items()}, self.rounds)
        sheet = data_sheet(jax.devices()[0].device_kind)
        peak = None if sheet is None else sheet.peak_flops * jax.device_count() / 100
        rows: list[Row] = []
        for gin, config in configs.items():
            tokens = config.batch_size * config.data.seq_len
            rate = tokens / seconds[gin]
            flops = training_flops_per_token(config.model, config.data.seq_len)
            row = {"gin": gin, "parameters": num_params(config.model), "MFLOP a token": flops / 1e6}
            row |= {"tokens": tokens, "step ms": over(seconds[gin], MILLISECOND)}
            row |= {"tokens/s": rate, "MFU %": over(rate * flops, peak)}
            rows.append(row | {"MiB": over(steps[gin][1], MIB), "time": 1 / rate, "FLOPs": flops})
        yield [row | {x: row[x] / rows[0][x] for x in ("time", "FLOPs")} for row in rows]


def random_step(config: RunConfig) -> tuple[Callable[[], Any], int]:
    """A call that takes a training step on a batch of random tokens and gives its metrics, for the
    caller to wait for, and the bytes of the step."""
    program, (B, T) = Program(config), (config.batch_size, config.data.seq_len)
    with jax.set_mesh(program.mesh):
        step = program.step().compile()
    vocab_size, shape = config.model.vocab_size, (B, T + 1)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape)
    source = CallerBatches(lambda _: [tokens], shape=shape, vocab_size=vocab_size, rows=range(B))
    ((_, batch),) = source.iterate(0, 1)
    batch["segment_ids"] = np.zeros_like(batch["tokens"])  # for data that pack documents
    state, placed = None, None

    def take() -> Any:
        nonlocal placed, state
        if state is None:  # the device's memory, from the first call on
            placed, state = program.placed(batch), program.fresh_state()
        state, metrics = step(state, placed)
        return metrics

    return take, measure.needed_bytes(step)


class Data(Step):
    """A timed round reads `batches` batches of the training split of a file, made and read ahead on
    the host by so many `workers` (0: a thread), also in other rows' turns. "step %": the time of a
    batch over that of a step, by its FLOPs at a share of the peak, on a node of 8 H100, which one
    process feeds."""

    batches: Positive = 50
    workers: tuple[NonNegative, ...] = (0,)

    quick: ClassVar[Row] = Step.quick | {"batches": 2}

    def tables(self) -> Iterator[list[Row]]:
        hardware, count = parse_topology("h100x8")
        programs, configs, rows = {}, self.configs(), []
        for gin, workers in itertools.product(configs, self.workers):
            config = configs[gin].replace(data_workers=workers)
            stream = build_data(config, range(config.batch_size))[0].iterate(0, 2**20)
            batches = functools.partial(itertools.islice, stream, self.batches)
            programs[gin, workers] = lambda x=batches: sum(1 for _ in x())
        for (gin, workers), seconds in measure.median_seconds(programs, self.rounds).items():
            size, length = configs[gin].batch_size, configs[gin].data.seq_len
            rate = self.batches / seconds
            tokens = rate * size * length
            flops = training_flops_per_token(configs[gin].model, length) * tokens
            share = 100 * count * PEAK_SHARE * hardware.peak_flops / flops
            row = {"gin": gin, "workers": workers, "tokens": size * length, "batches/s": rate}
            rows.append(row | {"rows/s": rate * size, "tokens/s": tokens, "step %": share})
        yield rows


class Prefill(Config):
    """Rows of `lengths` tokens under the teacher's `windows`; the student's are half. A table per
    window, batch size and length."""

    gin: str = "prefill/default.gin"
    param: tuple[str, ...] = ()
    models: tuple[Competitor, ...] = ("swa", "ipttt", "ipttcd")
    lengths: tuple[Positive, ...] = (65536, 262144)
    batch_sizes: tuple[Positive, ...] = (1, 4)
    windows: tuple[Positive, ...] = (2048, 8192, 16384)
    piece_size: Positive | None = None
    rounds: Positive = 5
    max_seconds: NonNegativeFloat = 120

    quick: ClassVar[Row] = {"gin": "prefill/cpu.gin", "param": _SMALL_PROMPT, "lengths": (32, 64)}
    quick |= {"batch_sizes": (2,), "windows": (8,), "piece_size": 16, "rounds": 1}

    def readings(self) -> Iterator[dict[str, "_Reading"]]:
        shape = load_config(TransformerConfig, self.gin, self.param, config_dir=CONFIG_DIR)
        for window in self.windows:
            models = {x: random_model(competitor(shape, x, window)) for x in self.models}
            for sizes in itertools.product(self.batch_sizes, self.lengths):
                yield {name: _Reading(model, sizes, self) for name, model in models.items()}

    def tables(self) -> Iterator[list[Row]]:
        for reads in self.readings():
            calls = {name: read for name, read in reads.items() if not read.row["note"]}
            seconds = measure.median_seconds(calls, self.rounds)
            rows = []
            for name, read in reads.items():
                time = seconds.get(name)
                row = {"model": name} | read.row | {"ms": over(time, MILLISECOND)}
                row["tokens/s"] = over(read.row["rows"] * read.row["tokens"], time)
                for base in BASELINES:
                    floor = over(read.flops, reads[base].flops if base in reads else None)
                    ratio = over(time, seconds.get(base))
                    row |= {f"/ {base}": ratio, f"FLOPs / {base}": floor}
                    row[f"beyond {base} %"] = 100 * (ratio / floor - 1) if ratio and floor else None
                rows.append(row)
            yield rows


class Decode(Prefill):
    """A timed round decodes `steps` tokens of every row after prompts of `lengths` tokens: a row
    per model, and one for its memory off while decoding ("published"). Models run one after
    another: two states may not fit at once."""

    lengths: tuple[Positive, ...] = (8192,)
    batch_sizes: tuple[Positive, ...] = (1, 2, 4, 8, 16, 32, 64)
    windows: tuple[Positive, ...] = (8192,)
    steps: Positive = 64

    quick: ClassVar[Row] = Prefill.quick | {"lengths": (16,), "steps": 2}

    def tables(self) -> Iterator[list[Row]]:
        for reads in self.readings():
            rows: list[Row] = []
            for name, read in reads.items():
                modes = get_args(MemoryMode)
                for memory in modes if has_in_place_memory(read.model.config) else modes[:1]:
                    time = None if read.row["note"] else self._seconds_of_step(read, memory)
                    row = {"model": name, "memory": memory} | read.row
                    row["ms a step"] = over(time, MILLISECOND)
                    rows.append(row | {"tokens/s": over(read.row["rows"], time)})
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


class _Reading:
    """Random rows, which a call reads into an empty state: (logits, state). `row` has sizes and, if
    they cannot be read, a note. Program bytes are the compiler's for a piece after a full window,
    parameters and state included."""

    def __init__(self, model: InferenceModel, shape: tuple[int, int], options: Prefill) -> None:
        config, (batch_size, length) = model.config, shape
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
                jax.block_until_ready(self())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.row["note"] = f"out of memory: {str(error).splitlines()[0][:100]}"

    def __call__(self) -> Any:
        state = start_state(self.model, len(self._tokens))
        return prefill(self.model, state, self._tokens, piece_size=self._piece_size)

    def _program_bytes(self, state: InferenceState) -> int:
        config, (B, length) = self.model.config, self._tokens.shape
        assert config.window is not None
        shape = B, even_size(config, length, self._piece_size)
        tokens, lengths = (jax.ShapeDtypeStruct(x, jnp.int32) for x in (shape, shape[:1]))
        seen: Any = {"halo": config.window - 1, "has_gap": False}
        lowered = read_piece.lower(self.model, state, tokens, lengths, **seen)
        return measure.needed_bytes(lowered.compile())


def why_not_run(needed: int, flops: float, max_seconds: float) -> str:
    """The reason why a program of `needed` further bytes is only compiled; empty if it is run. The
    seconds of a call are estimated at the rate of a matrix product on this device."""
    limit = measure.usable_bytes()
    if needed > limit:
        return f"compiled only: does not fit in {measure.gibibytes(limit)}"
    if not max_seconds:
        return "compiled only"
    seconds = flops / _ceilings().flops_per_second
    if seconds > max_seconds:
        return f"compiled only: at least {seconds:.0f} s a call, the limit is {max_seconds:g} s"
    return ""


def prefill_flops(config: TransformerConfig, length: int) -> float:
    """FLOPs of reading a row, logits of its last token only."""
    return forward_flops(config, length) - 2 * (length - 1) * config.dim * config.vocab_size


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@jax.jit
def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def competitor(shape: TransformerConfig, method: str, window: int) -> TransformerConfig:
    """A model in the shape of an IP-TTCD model under the teacher's window; the student's is half.
    Parameters are stored in the precision that computes."""
    precision, memory = shape.precision.replace(param=shape.precision.compute), shape.settings
    shape = shape.replace(window=window, student_window=max(window // 2, 1), precision=precision)
    if method == "swa":
        return shape.replace(method=method, fast_layers=(), memory=None)
    if method == "ipttt" and isinstance(memory, InPlaceSettings):
        # Causal and random, so that the memory can be read in pieces and its updates are not 0.
        options: Any = {"is_conv_causal": True, "conv_init": "normal"}
        memory = TargetMemoryConfig(chunk_size=memory.chunk_size, **options)
    return shape.replace(method=method, memory=memory)


def random_model(config: TransformerConfig) -> InferenceModel:
    """The model with parameters drawn with seed 0."""
    params = jax.jit(functools.partial(init_params, config, 0))()
    return inference_model(with_params(config, params))


CASES = {"step": Step, "data": Data, "prefill": Prefill, "decode": Decode}
