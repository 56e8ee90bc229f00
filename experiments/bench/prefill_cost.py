"""What it costs to read long rows and to decode behind them: time, memory and arithmetic of several
methods beside each other, on random tokens."""

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ttcd_kernels import measure

from experiments.bench.prefill_models import COMPETITORS, operations
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import InferenceModel
from ttcd_jax.inference.prefill import Memory, prefill, read_last
from ttcd_jax.inference.state import InferenceState, start_state, state_bytes
from ttcd_jax.models.config import TransformerConfig, has_in_place_memory
from ttcd_jax.train.flops import forward_flops
from ttcd_jax.train.state import abstract_model

BASELINES = ("swa", "ipttt")  # what times and FLOPs are set beside

# Largest difference of the naive form's logits to the fused one's over the largest logit.
_BOUNDS = {
    "float32": 1e-3,  # an accelerator multiplies float32 in fewer bits unless told otherwise
    "bfloat16": 5e-2,  # every layer rounds anew
}


class Setting(NamedTuple):
    """Rows of one shape under one window; the student sees half of it."""

    length: int
    batch_size: int
    window: int


class PrefillRow(NamedTuple):
    """One model in one setting; None where it, or the baseline, was not run. `program_bytes`: what
    the compiler plans for a piece behind a full window, parameters and state included;
    `device_bytes`: the most that the process has held on the device until then, if it tells."""

    model: str
    label: str
    length: int
    batch_size: int
    window: int
    seconds: float | None  # median
    min_seconds: float | None
    max_seconds: float | None
    tokens_per_second: float | None
    time_over_swa: float | None
    flops_over_swa: float | None
    time_over_ipttt: float | None
    flops_over_ipttt: float | None
    flops: float  # of all rows, logits of their last tokens only
    program_bytes: int | None
    state_bytes: int
    device_bytes: int | None
    distance: float | None  # of the naive logits to the fused, over the largest
    note: str


class DecodeRow(NamedTuple):
    """Greedy decoding of one model at one batch size; None where it was not run. `memory`: whether
    it goes on learning ("kept") or is off while decoding ("published")."""

    model: str
    label: str
    memory: str
    batch_size: int
    window: int | None
    context: int  # tokens in front of the first step
    seconds: float | None  # of a step
    tokens_per_second: float | None
    time_over_swa: float | None
    state_bytes: int
    note: str


class MemoryRow(NamedTuple):
    """What a prefill needs by length, as the compiler plans it, parameters included: in pieces, and
    of the training forward, which reads a row at once (None where not asked for or refused)."""

    model: str
    label: str
    length: int
    batch_size: int
    window: int
    state_bytes: int
    piece_bytes: int
    whole_bytes: int | None
    note: str


def prefill_flops(config: TransformerConfig, length: int) -> float:
    """FLOPs of reading a row, logits of its last token only."""
    return forward_flops(config, length) - 2 * (length - 1) * config.dim * config.vocab_size


def prefill_rows(
    models: Mapping[str, InferenceModel],
    setting: Setting,
    *,
    piece_size: int,
    rounds: int,
    max_seconds: float,
) -> list[PrefillRow]:
    """All models in one setting; their timed calls take turns. What would not fit in memory, or
    would take longer than `max_seconds` a call by the speed of its first piece, is not run."""
    tokens = _tokens(models, setting.batch_size, setting.length)
    logits, program, device, notes = {}, {}, {}, {}
    for name, model in models.items():
        try:
            program[name] = piece_bytes(model, setting.batch_size, piece_size)
            notes[name] = _why_not(model, program[name], tokens, piece_size, max_seconds)
            if not notes[name]:
                logits[name] = np.asarray(_read(model, tokens, piece_size).logits, np.float32)
        except jax.errors.JaxRuntimeError as error:
            notes[name] = _out_of_memory(error)
        device[name] = _device_bytes()
    samples: dict[str, list[float]] = {name: [] for name in logits}
    for _ in range(rounds):
        for name in samples:
            samples[name].append(_read(models[name], tokens, piece_size).seconds)
    rows = []
    for name, model in models.items():
        distance = _distance(logits, name)
        if name in logits:
            notes[name] = _failure(model.config, logits[name], distance)
        row = PrefillRow(
            model=name,
            label=COMPETITORS[name].label,
            **setting._asdict(),
            **_timed(models, samples, name, setting),
            program_bytes=program.get(name),
            state_bytes=_state_bytes(model.config, setting.batch_size),
            device_bytes=device[name],
            distance=distance,
            note=notes[name],
        )
        rows.append(row)
    return rows


def _tokens(models: Mapping[str, InferenceModel], batch_size: int, length: int) -> np.ndarray:
    vocab_size = next(iter(models.values())).config.vocab_size
    return np.random.default_rng(0).integers(0, vocab_size, (batch_size, length), np.int32)


class _Reading(NamedTuple):
    seconds: float
    logits: jax.Array
    state: InferenceState


def _read(model: InferenceModel, tokens: np.ndarray, piece_size: int) -> _Reading:
    """Reads rows into an empty state; the clock starts when that is there."""
    with operations(model.config):
        state = jax.block_until_ready(start_state(model, len(tokens)))
        start = time.perf_counter()
        logits, state = jax.block_until_ready(prefill(model, state, tokens, piece_size=piece_size))
        return _Reading(time.perf_counter() - start, logits, state)


def _why_not(
    model: InferenceModel, program: int, tokens: np.ndarray, piece_size: int, max_seconds: float
) -> str:
    """Why the rows are not read; empty: they are. `program`: what a piece needs. Compiles that of
    the first piece."""
    parameters = sum(x.nbytes for x in jax.tree.leaves(model))  # which are there already
    limit = measure.usable_bytes()
    if program - parameters > limit:
        return f"skipped: does not fit in {measure.gibibytes(limit)}"
    if not max_seconds:
        return "skipped: compiled only"
    piece = tokens[:, :piece_size]
    _read(model, piece, piece_size)
    flops, flops_of_piece = (prefill_flops(model.config, x.shape[1]) for x in (tokens, piece))
    estimate = _read(model, piece, piece_size).seconds * flops / flops_of_piece
    if estimate > max_seconds:
        return f"skipped: about {estimate:.0f} s a call, the limit is {max_seconds:g} s"
    return ""


def piece_bytes(model: InferenceModel, batch_size: int, piece_size: int) -> int:
    """What the compiler plans for a piece behind a full window, parameters and state included: of
    the very program that a prefill runs, whatever the length of its rows."""
    config = model.config
    assert config.window is not None
    state = start_state(model, batch_size)
    hidden = jax.ShapeDtypeStruct((batch_size, config.dim), config.precision.compute_dtype)
    tokens = jax.ShapeDtypeStruct((batch_size, piece_size), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    with operations(config):
        lowered = read_last.lower(
            model, state, hidden, tokens, lengths, None, halo=config.window - 1, has_gap=False
        )
    return measure.needed_bytes(lowered.compile())


@functools.cache
def _state_bytes(config: TransformerConfig, batch_size: int) -> int:
    return state_bytes(config, batch_size)["total"]


def _out_of_memory(error: RuntimeError) -> str:
    """A note; any other error is raised again."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return f"out of memory: {str(error).splitlines()[0][:100]}"


def _device_bytes() -> int | None:
    """The most that this process has held on the device."""
    stats = jax.devices()[0].memory_stats() or {}  # a CPU has none
    return stats.get("peak_bytes_in_use")


def _timed(
    models: Mapping[str, InferenceModel],
    samples: Mapping[str, list[float]],
    name: str,
    setting: Setting,
) -> dict[str, Any]:
    """The fields of a row that times and FLOPs fill."""
    flops = {each: prefill_flops(model.config, setting.length) for each, model in models.items()}
    times = {each: statistics.median(taken) for each, taken in samples.items()}
    fields: dict[str, Any] = {"flops": setting.batch_size * flops[name]}
    fields |= dict.fromkeys(("seconds", "min_seconds", "max_seconds", "tokens_per_second"))
    if name in times:
        rate = setting.batch_size * setting.length / times[name]
        fields |= {"seconds": times[name], "tokens_per_second": rate}
        fields |= {"min_seconds": min(samples[name]), "max_seconds": max(samples[name])}
    for base in BASELINES:
        is_timed = name in times and base in times
        fields[f"time_over_{base}"] = times[name] / times[base] if is_timed else None
        fields[f"flops_over_{base}"] = flops[name] / flops[base] if base in flops else None
    return fields


def _distance(logits: Mapping[str, np.ndarray], name: str) -> float | None:
    """Of a naive model's logits to the fused one's."""
    if not COMPETITORS[name].is_naive or not {name, COMPETITORS[name].method} <= logits.keys():
        return None
    fused = logits[COMPETITORS[name].method]
    return float(np.abs(logits[name] - fused).max() / np.abs(fused).max())


def _failure(config: TransformerConfig, logits: np.ndarray, distance: float | None) -> str:
    """A note that fails the benchmark; empty: the numbers are what they should be."""
    if not np.isfinite(logits).all():
        return f"{measure.FAILED}logits that are not finite"
    bound = _BOUNDS[config.precision.compute]
    if distance is not None and distance > bound:
        return f"{measure.FAILED}{distance:.1e} from the fused form, the bound is {bound:.0e}"
    return ""


def decode_rows(
    models: Mapping[str, InferenceModel],
    batch_size: int,
    context: int,
    *,
    steps: int,
    **limits: Any,
) -> list[DecodeRow]:
    """All models at one batch size, behind `context` random tokens: the median of rounds of `steps`
    steps. One after another: two states may not fit beside each other. `limits`: those of
    `prefill_rows`."""
    tokens = _tokens(models, batch_size, context)
    rows: list[DecodeRow] = []
    for name, model in models.items():
        memories: list[Memory] = ["kept"]
        if has_in_place_memory(model.config):
            memories.append("published")
        for memory in memories:
            seconds, note = _decoded(model, tokens, memory, steps, **limits)
            row = DecodeRow(
                model=name,
                label=COMPETITORS[name].label + (", memory off" if memory != "kept" else ""),
                memory=memory,
                batch_size=batch_size,
                window=model.config.window,
                context=context,
                seconds=seconds,
                tokens_per_second=batch_size / seconds if seconds else None,
                time_over_swa=None,
                state_bytes=_state_bytes(model.config, batch_size),
                note=note,
            )
            rows.append(row)
    base = next((row.seconds for row in rows if row.model == "swa"), None)
    return [
        row._replace(time_over_swa=row.seconds / base) if row.seconds and base else row
        for row in rows
    ]


def _decoded(
    model: InferenceModel,
    tokens: np.ndarray,
    memory: Memory,
    steps: int,
    *,
    piece_size: int,
    rounds: int,
    max_seconds: float,
) -> tuple[float | None, str]:
    """(median seconds of a step, why there are none)."""
    try:
        program = piece_bytes(model, len(tokens), piece_size)
        note = _why_not(model, program, tokens, piece_size, max_seconds)
        if note:
            return None, note
        _, logits, state = _read(model, tokens, piece_size)
        samples = []
        for count in (1, *(steps,) * rounds):  # the first compiles
            start = time.perf_counter()
            for _ in range(count):
                logits, state = decode(model, state, _greedy(logits), memory=memory)
            jax.block_until_ready((logits, state))
            samples.append((time.perf_counter() - start) / count)
    except jax.errors.JaxRuntimeError as error:
        return None, _out_of_memory(error)
    return statistics.median(samples[1:]), ""


@jax.jit
def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def memory_rows(
    models: Mapping[str, InferenceModel],
    settings: Sequence[Setting],
    *,
    piece_size: int,
    has_whole_rows: bool,
) -> list[MemoryRow]:
    """Every model at every length; compiled only. The settings differ in nothing else."""
    rows = []
    for name, model in models.items():
        piece = piece_bytes(model, settings[0].batch_size, piece_size)
        for setting in settings:
            whole, note = None, ""
            if has_whole_rows:
                try:
                    whole = _whole_bytes(model.config, setting)
                except jax.errors.JaxRuntimeError as error:
                    note = _out_of_memory(error)
            row = MemoryRow(
                model=name,
                label=COMPETITORS[name].label,
                **setting._asdict(),
                state_bytes=_state_bytes(model.config, setting.batch_size),
                piece_bytes=piece,
                whole_bytes=whole,
                note=note,
            )
            rows.append(row)
    return rows


def _whole_bytes(config: TransformerConfig, setting: Setting) -> int:
    """Of the training forward with the logits of the last token."""
    graph, params = nnx.split(abstract_model(config))

    def last_logits(params, tokens):
        model = nnx.merge(graph, params)
        return model.logits(model.forward(tokens)[0][:, -1:])

    tokens = jax.ShapeDtypeStruct((setting.batch_size, setting.length), jnp.int32)
    with operations(config):
        return measure.needed_bytes(jax.jit(last_logits).lower(params, tokens).compile())
