"""Training steps of several configurations on random tokens, and their input pipelines."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from ttcd_kernels import measure
from ttcd_kernels.measure import MIB, MILLISECOND, Row, over

from experiments import cli
from experiments.plan import PEAK_SHARE, make_plan
from experiments.studies.bench.frame import Case
from ttcd_jax.config import DISTINCT, Config, Positive
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.mixture import RecordsConfig
from ttcd_jax.data.pipeline import CallerBatches
from ttcd_jax.data.preparation import prepare_records
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.run import build
from ttcd_jax.run.bindings import load_config
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.layout import run_mesh
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.hardware import DEVICES_PER_NODE, data_sheet, parse_topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(Config):
    """Options of the step case; `param` overrides bindings of every file."""

    gin: Annotated[tuple[str, ...], DISTINCT] = ()
    param: tuple[str, ...] = ()
    rounds: Positive = 5

    def loaded(self) -> dict[str, RunConfig]:
        where = cli.CONFIG_DIR
        return {x: load_config(RunConfig, x, self.param, config_dir=where) for x in self.gin}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(Step):
    """Options of the data case; a timed round reads `batches` batches. With `random_tokens`, they
    are of two folders of records with so many random tokens each, mixed 8 to 2."""

    batches: Positive = 50
    random_tokens: Positive | None = None
    topology: str = "h100x8"


def measured_data(options: Data) -> Iterator[list[Row]]:
    """A row per file: batches of its training split, made and read ahead on the host. "step %": the
    time of a batch over that of a step, by its FLOPs at a share of the peak, on those devices of
    `topology` that one process feeds."""
    hardware, count = parse_topology(options.topology)
    node = min(count, DEVICES_PER_NODE) * PEAK_SHARE * hardware.peak_flops
    programs, configs, rows = {}, options.loaded(), []
    with tempfile.TemporaryDirectory() as folder:
        if options.random_tokens is not None:
            paths = _random_records(Path(folder), options.random_tokens)
            random = functools.partial(RecordsConfig, paths=paths, weights=(8, 2))
            configs = {
                gin: config.replace(data=random(seq_len=config.data.seq_len))
                for gin, config in configs.items()
            }
        for gin, config in configs.items():
            batches, _ = build.build_data(config, range(config.batch_size))
            programs[gin] = lambda x=batches: sum(1 for _ in x.iterate(0, options.batches))
        for gin, seconds in measure.median_seconds(programs, options.rounds).items():
            size, length = configs[gin].batch_size, configs[gin].data.seq_len
            rate = options.batches / seconds
            row = {"gin": gin, "tokens": size * length, "batches/s": rate, "rows/s": rate * size}
            speed = node / training_flops_per_token(configs[gin].model, length)
            tokens = row["rows/s"] * length
            rows.append(row | {"tokens/s": tokens, "step %": 100 * speed / tokens})
    yield rows


def _random_records(folder: Path, num_tokens: int) -> tuple[str, ...]:
    """Two folders of records of random letters, in documents of 8,192 tokens."""
    shape = 2, -(-num_tokens // 8192), 8190
    for number, texts in enumerate(np.random.default_rng(0).integers(65, 91, shape, np.uint8)):
        lines = (json.dumps({"text": text.tobytes().decode()}) + "\n" for text in texts)
        source, target = folder / f"{number}.jsonl", folder / str(number)
        source.write_text("".join(lines))
        target.mkdir()
        corpus = CorpusConfig(kind="text", path=str(source), validation_percent=0)
        prepare_records(corpus, TokenizerConfig(kind="byte"), target)
    return str(folder / "0"), str(folder / "1")


def measured_steps(options: Step) -> Iterator[list[Row]]:
    """A row per file. "time" and "FLOPs" are per token, over those of the first file; memory is
    that of the compiled step, the state included."""
    runs = {gin: Run(config) for gin, config in options.loaded().items()}
    seconds = measure.median_seconds({gin: run.take for gin, run in runs.items()}, options.rounds)
    sheet = data_sheet(jax.devices()[0].device_kind)
    peak = None if sheet is None else sheet.peak_flops * jax.device_count() / 100
    rates = {gin: run.tokens / seconds[gin] for gin, run in runs.items()}
    rows, first = [], options.gin[0]
    for gin, run in runs.items():
        row = {"gin": gin, "tokens": run.tokens, "step ms": over(seconds[gin], MILLISECOND)}
        row |= {"tokens/s": rates[gin], "MFU %": over(rates[gin] * run.flops_per_token, peak)}
        row |= {"MiB": over(run.bytes, MIB), "time": rates[first] / rates[gin]}
        rows.append(row | {"FLOPs": run.flops_per_token / runs[first].flops_per_token})
    yield rows


def random_tokens(config: RunConfig) -> np.ndarray:
    """A batch of rows of `seq_len + 1` tokens."""
    shape = (config.batch_size, config.data.seq_len + 1)
    return np.random.default_rng(0).integers(0, config.model.vocab_size, shape)


class Run:
    """A compiled step, its state and a batch of random tokens."""

    def __init__(self, config: RunConfig) -> None:
        mesh, length, entries = run_mesh(config), config.data.seq_len, config.model.vocab_size
        _, self._step = make_plan(config, mesh)
        tokens, rows = random_tokens(config), range(config.batch_size)
        shape = (config.batch_size, length + 1)
        batches = CallerBatches(lambda _: [tokens], shape=shape, vocab_size=entries, rows=rows)
        ((_, batch),) = batches.iterate(0, 1)
        batch["segment_ids"] = np.zeros_like(batch["tokens"])  # for data that pack documents
        fields = {name: batch[name] for name in build.batch_fields(config)}
        self._batch = build.placement(config, mesh)(fields)
        self.tokens = config.batch_size * length
        self.flops_per_token = training_flops_per_token(config.model, length)
        self.bytes = measure.needed_bytes(self._step)
        self.state = build.fresh_state(config, mesh)

    def take(self) -> Any:
        """Takes one step; returns its metrics, for the caller to wait for."""
        self.state, metrics = self._step(self.state, self._batch)
        return metrics


SMALL = ("RunConfig.batch_size=2", "TransformerConfig.dim=8", "RecallConfig.num_slots=8")
_QUICK: Row = {"gin": ("recall.gin", "recall_swa.gin"), "param": SMALL, "rounds": 1}
CASES = {
    "step": Case(Step, _QUICK, measured_steps),
    "data": Case(Data, _QUICK | {"batches": 2}, measured_data),
}
