"""Reports of a training run: metric files, TensorBoard and the live line, fed by one callback."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

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
def reporter(
    config: RunConfig, directory: Path, start: int
) -> Iterator[tuple[list[MetricCallback], Callable[[int, dict[str, float]], None]]]:
    """(callbacks that report a run every `log_every` steps, function that writes other metrics of a
    step); both do nothing but in the first process."""
    if jax.process_index():
        yield [], lambda step, record: None
        return
    tokens = config.batch_size * config.data.seq_len
    throughput = Throughput(start=start, steps=config.steps, tokens_per_step=tokens)
    line = ProgressLine(config.steps)
    flops_per_token = training_flops_per_token(config.model, config.data.seq_len)
    peak = peak_flops(jax.devices()[0].device_kind)

    def log(step: int, metrics: HostMetrics) -> None:
        rate, seconds_left = throughput.update(step)
        record = flat_metrics(metrics) | {"tokens_per_second": rate}
        if peak is not None:
            record["mfu"] = rate * flops_per_token / (peak * jax.device_count())
        files.write(step, record)
        line.show(step, record, seconds_left)

    with contextlib.closing(MetricFiles(directory, start=start)) as files:
        yield [MetricCallback(config.log_every, log)], files.write
