"""Training steps of several configurations on random tokens, and their input pipelines."""

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from ttcd_kernels import measure
from ttcd_kernels.measure import MIB, MILLISECOND, Row, over

from experiments.plan import PEAK_SHARE
from experiments.studies.bench.case import Case, loaded
from ttcd_jax.config import DISTINCT, Positive
from ttcd_jax.data.corpus import CorpusConfig
from ttcd_jax.data.mixture import RecordsConfig
from ttcd_jax.data.pipeline import CallerBatches
from ttcd_jax.data.preparation import prepare_records
from ttcd_jax.data.tokenizer import TokenizerConfig
from ttcd_jax.run import build
from ttcd_jax.run.config import RunConfig
from ttcd_jax.run.layout import run_mesh
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.hardware import DEVICES_PER_NODE, data_sheet, parse_topology

_SMALL = ("RunConfig.batch_size=2", "TransformerConfig.dim=8", "RecallConfig.num_slots=8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(Case):
    """A row per file of `gin`, with `param` of all. "time" and "FLOPs" are per token, over those of
    the first file; memory is that of the compiled step, the state included."""

    gin: Annotated[tuple[str, ...], DISTINCT] = ()
    param: tuple[str, ...] = ()
    rounds: Positive = 5

    quick: ClassVar[Row] = {"gin": ("recall.gin", "recall_swa.gin"), "param": _SMALL, "rounds": 1}

    def configs(self) -> dict[str, RunConfig]:
        return {gin: loaded(RunConfig, gin, self.param) for gin in self.gin}

    def tables(self) -> Iterator[list[Row]]:
        runs = {gin: Run(config) for gin, config in self.configs().items()}
        seconds = measure.median_seconds({gin: run.take for gin, run in runs.items()}, self.rounds)
        sheet = data_sheet(jax.devices()[0].device_kind)
        peak = None if sheet is None else sheet.peak_flops * jax.device_count() / 100
        rates = {gin: run.tokens / seconds[gin] for gin, run in runs.items()}
        rows, first = [], self.gin[0]
        for gin, run in runs.items():
            row = {"gin": gin, "tokens": run.tokens, "step ms": over(seconds[gin], MILLISECOND)}
            row |= {"tokens/s": rates[gin], "MFU %": over(rates[gin] * run.flops_per_token, peak)}
            row |= {"MiB": over(run.bytes, MIB), "time": rates[first] / rates[gin]}
            rows.append(row | {"FLOPs": run.flops_per_token / runs[first].flops_per_token})
        yield rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(Step):
    """A timed round reads `batches` batches of the training split of a file, made and read ahead on
    the host; with `random_tokens`, of two folders of records with so many random tokens each, mixed
    8 to 2. "step %": the time of a batch over that of a step, by its FLOPs at a share of the peak,
    on those devices of `topology` that one process feeds."""

    batches: Positive = 50
    random_tokens: Positive | None = None
    topology: str = "h100x8"

    quick: ClassVar[Row] = Step.quick | {"batches": 2}

    def tables(self) -> Iterator[list[Row]]:
        hardware, count = parse_topology(self.topology)
        node = min(count, DEVICES_PER_NODE) * PEAK_SHARE * hardware.peak_flops
        programs, configs, rows = {}, self.configs(), []
        with tempfile.TemporaryDirectory() as folder:
            if self.random_tokens is not None:
                paths = _random_records(Path(folder), self.random_tokens)
                for gin, config in configs.items():
                    sizes: Any = {"weights": (8, 2), "seq_len": config.data.seq_len}
                    configs[gin] = config.replace(data=RecordsConfig(paths=paths, **sizes))
            for gin, config in configs.items():
                batches, _ = build.build_data(config, range(config.batch_size))
                programs[gin] = lambda x=batches: sum(1 for _ in x.iterate(0, self.batches))
            for gin, seconds in measure.median_seconds(programs, self.rounds).items():
                size, length = configs[gin].batch_size, configs[gin].data.seq_len
                rate = self.batches / seconds
                tokens = rate * size * length
                share = node / training_flops_per_token(configs[gin].model, length) / tokens
                row = {"gin": gin, "tokens": size * length, "batches/s": rate}
                row |= {"rows/s": rate * size, "tokens/s": tokens, "step %": 100 * share}
                rows.append(row)
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


class Run:
    """A compiled step, its state and a batch of random tokens."""

    def __init__(self, config: RunConfig) -> None:
        program = build.Program(config, run_mesh(config))
        length, entries = config.data.seq_len, config.model.vocab_size
        with jax.set_mesh(program.mesh):
            self._step = program.step().compile()
        rows, shape = range(config.batch_size), (config.batch_size, length + 1)
        tokens = np.random.default_rng(0).integers(0, entries, shape)
        batches = CallerBatches(lambda _: [tokens], shape=shape, vocab_size=entries, rows=rows)
        ((_, batch),) = batches.iterate(0, 1)
        batch["segment_ids"] = np.zeros_like(batch["tokens"])  # for data that pack documents
        self._batch = program.placed(batch)
        self.tokens = config.batch_size * length
        self.flops_per_token = training_flops_per_token(config.model, length)
        self.bytes = measure.needed_bytes(self._step)
        self.state = program.fresh_state()

    def take(self) -> Any:
        """Takes one step; returns its metrics, for the caller to wait for."""
        self.state, metrics = self._step(self.state, self._batch)
        return metrics
