"""Training steps of several configurations on random tokens, and their input pipelines."""

import contextlib
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import jax
import numpy as np
from ttcd_kernels import measure
from ttcd_kernels.measure import MIB, MILLISECOND, Row, over

from experiments import cli
from experiments.bench.frame import Case
from experiments.gin_loading import load_config
from ttcd_jax.config import DISTINCT, Config, NonNegative, Positive
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.layout import run_mesh
from ttcd_jax.train.checkpoint import Checkpoints
from ttcd_jax.train.flops import peak_flops, training_flops_per_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(Config):
    """A timed round makes `batches`."""

    gin: Annotated[tuple[str, ...], DISTINCT] = ()
    param: tuple[str, ...] = ()
    rounds: Positive = 5
    batches: Positive = 50

    def loaded(self) -> dict[str, RunConfig]:
        """The configurations by file."""
        load = functools.partial(load_config, RunConfig, config_dir=cli.CONFIG_DIR)
        return {gin: load(gin, self.param) for gin in self.gin}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(Data):
    """`saves` checkpoints per file go into the system's temporary folder (TMPDIR)."""

    saves: NonNegative = 1


def measured_data(options: Data) -> Iterator[list[Row]]:
    """A row per file: batches of its training split, made and read ahead on the host."""
    programs, rows = {}, {}
    for gin, config in options.loaded().items():
        batches, _ = build.build_data(config, range(config.batch_size))
        programs[gin] = lambda batches=batches: list(batches.iterate(0, options.batches))
        rows[gin] = {"gin": gin, "tokens": config.batch_size * config.data.seq_len}
    for gin, seconds in measure.median_seconds(programs, options.rounds).items():
        rate = options.batches / seconds
        rows[gin] |= {"batches/s": rate, "tokens/s": rate * rows[gin]["tokens"]}
    yield list(rows.values())


def measured_steps(options: Step) -> Iterator[list[Row]]:
    """A row per file. "time" and "FLOPs" are per token, over those of the first file; memory is
    that of the compiled step, the state included. Then every run steps on while it saves."""
    runs = {gin: _Run(config) for gin, config in options.loaded().items()}
    seconds = measure.median_seconds({gin: run.take for gin, run in runs.items()}, options.rounds)
    peak = over(peak_flops(jax.devices()[0].device_kind), 100 / jax.device_count())
    rates = {gin: run.tokens / seconds[gin] for gin, run in runs.items()}
    rows, first = [], options.gin[0]
    for gin, run in runs.items():
        row = {"gin": gin, "tokens": run.tokens, "step ms": over(seconds[gin], MILLISECOND)}
        row |= {"tokens/s": rates[gin], "MFU %": over(rates[gin] * run.flops_per_token, peak)}
        row |= {"MiB": over(run.bytes, MIB), "time": rates[first] / rates[gin]}
        row |= {"FLOPs": run.flops_per_token / runs[first].flops_per_token}
        rows.append(row | _saving(run, options))
    yield rows


class _Run:
    """A compiled step, its state and a batch."""

    def __init__(self, config: RunConfig) -> None:
        mesh = run_mesh(config)
        place, batch = build.placement(config, mesh), build.abstract_batch(config, mesh)
        with jax.set_mesh(mesh):
            step = build.build_step(config, mesh).lower(build.abstract_state(config, mesh), batch)
        self._step, self._batch = step.compile(), place(_batch(batch, config.model.vocab_size))
        self.tokens = config.batch_size * config.data.seq_len
        self.flops_per_token = training_flops_per_token(config.model, config.data.seq_len)
        self.bytes = measure.needed_bytes(self._step)
        self.state = build.fresh_state(config, mesh)

    def take(self) -> Any:
        """One step; its metrics, to wait for."""
        self.state, metrics = self._step(self.state, self._batch)
        return metrics


def _batch(shapes: dict[str, jax.ShapeDtypeStruct], vocab_size: int) -> dict[str, np.ndarray]:
    """Random tokens, every one a target, one document per row."""
    B, T = shapes["tokens"].shape
    tokens = np.random.default_rng(0).integers(0, vocab_size, (B, T))
    fields = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1)}
    fields |= {"segment_ids": np.zeros((B, T)), "loss_mask": np.ones((B, T))}
    fields |= {"positions": np.tile(np.arange(T), (B, 1))}
    return {name: x.astype(shapes[name].dtype) for name, x in fields.items()}


def _saving(run: _Run, options: Step) -> Row:
    """Medians: the loop's wait for a checkpoint, and a step while one is written."""
    waits, steps = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints,
        ThreadPoolExecutor(1) as pool,
    ):
        for number in range(options.saves):
            jax.block_until_ready(run.state)
            save = functools.partial(checkpoints.save, number, dict(run.state))
            waits.append(_milliseconds(save))
            written = pool.submit(checkpoints.wait)
            while not written.done():
                steps.append(_milliseconds(run.take))
            written.result()
    wait, step = (statistics.median(taken) if taken else None for taken in (waits, steps))
    return {"save ms": wait, "step ms, saving": step}


def _milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / MILLISECOND


_SMALL = ("RunConfig.batch_size=2", "TransformerConfig.dim=8", "RecallConfig.num_slots=8")
_QUICK: Row = {"gin": ("recall.gin", "recall_swa.gin"), "param": _SMALL, "rounds": 1, "batches": 2}
CASES = {"step": Case(Step, _QUICK, measured_steps), "data": Case(Data, _QUICK, measured_data)}
