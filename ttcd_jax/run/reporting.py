"""Reports of a training run: metric files, TensorBoard and the live line, fed by one callback."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import jax

from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.flops import peak_flops, training_flops_per_token
from ttcd_jax.train.loop import HostMetrics, MetricCallback
from ttcd_jax.train.metrics import MetricFiles, ProgressLine, Throughput, flat_metrics


def say(line: str) -> None:
    """Prints a line, if this is the first process."""
    if jax.process_index() == 0:
        print(line, flush=True)


@contextlib.contextmanager
def reporter(config: RunConfig, directory: Path, start: int) -> Iterator[list[MetricCallback]]:
    """The callbacks that report a run: of several processes the first one's, of the others none."""
    if jax.process_index():
        yield []
        return
    with Reporter(config, directory, start) as reporter:
        yield reporter.callbacks()


class Reporter:
    """Every step's loss goes to the files; every `log_every` steps the rest and a line."""

    def __init__(self, config: RunConfig, directory: Path, start: int) -> None:
        length = config.data.seq_len
        tokens = config.batch_size * length
        self._files = MetricFiles(directory, start=start)
        self._throughput = Throughput(start=start, steps=config.steps, tokens_per_step=tokens)
        self._line = ProgressLine(config.steps)
        self._flops_per_token = training_flops_per_token(config.model, length)
        self._peak = peak_flops(jax.devices()[0].device_kind)
        self._log_every = config.log_every

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def callbacks(self) -> list[MetricCallback]:
        return [MetricCallback(self._log_every, self._log)]

    def _log(self, step: int, metrics: HostMetrics) -> None:
        rate, seconds_left = self._throughput.update(step)
        record = flat_metrics(metrics) | {"tokens_per_second": rate}
        if self._peak is not None:
            record["mfu"] = rate * self._flops_per_token / (self._peak * jax.device_count())
        self._files.write(step, record)
        self._line.show(step, record, seconds_left)
