"""Measures training steps of several configurations beside each other.

    python -m experiments.bench.step --gin=ipttcd_760m.gin --gin=swa_760m.gin
        [--param=RunConfig.batch_size=1 ...] [--rounds=5] [--saves=1] [--json=FILE]

The steps of all files take turns in one process, on random tokens: no corpus is read. Times and
FLOPs stand per token beside those of the first file. Then every run steps on while checkpoints are
written. Memory is that of the compiled step, the state included; the most the process ever held is
in the report, and that of a file if it is the only one.
"""

import contextlib
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from experiments import cli
from ttcd_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("gin", None, "A file in experiments/configs/, or a path.", required=True)
flags.DEFINE_multi_string("param", [], "A binding that overrides all files, as Class.field=value.")
flags.DEFINE_integer("rounds", 5, "Timed rounds; all steps take turns.", lower_bound=1)
flags.DEFINE_integer("saves", 1, "Checkpoints per file, 0: none.", lower_bound=0)
flags.DEFINE_string("save_dir", None, "Where they go; default: the system's temporary folder.")
flags.DEFINE_string("json", None, "File for the report.")


class StepRow(NamedTuple):
    """One step of one file. Ratios are per token, to the first file; `mfu` is None on a device of
    unknown peak, the times of saving are None with --saves=0."""

    gin: str
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    step_bytes: int
    time_ratio: float
    flops_ratio: float
    seconds_to_hand_over: float | None  # the loop waits so long for a checkpoint
    seconds_while_saving: float | None  # of a step, while the checkpoint is written


def main(argv: list[str]) -> None:
    folders = {"json": FLAGS.json and Path(FLAGS.json).parent, "save_dir": FLAGS.save_dir}
    for flag, folder in folders.items():
        if folder and not Path(folder).is_dir():
            raise UserError(f"--{flag}: no folder {folder}; create it first")
    if len(set(FLAGS.gin)) < len(FLAGS.gin):
        raise UserError(f"--gin names a file twice: {', '.join(FLAGS.gin)}")
    import jax
    from ttcd_kernels import measure

    environment = measure.environment() | {"device_count": jax.device_count()}
    print(" ".join(f"{key}={value}" for key, value in environment.items()), flush=True)
    runs = {gin: _Run(gin, FLAGS.param) for gin in FLAGS.gin}
    seconds = measure.median_seconds({gin: run.take for gin, run in runs.items()}, FLAGS.rounds)
    rows = [_row(run, seconds, next(iter(runs.values()))) for run in runs.values()]
    print(_table(rows))
    if FLAGS.json:
        stats = jax.devices()[0].memory_stats() or {}  # a CPU has none
        report = {
            "environment": environment,
            "params": FLAGS.param,
            "peak_bytes": stats.get("peak_bytes_in_use"),
            "rows": [row._asdict() for row in rows],
        }
        Path(FLAGS.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


class _Run:
    """A compiled step, its state and a batch."""

    def __init__(self, gin: str, params: list[str]) -> None:
        import jax
        from ttcd_kernels import measure

        from experiments.gin_loading import load_config
        from ttcd_jax.run import build
        from ttcd_jax.run.config import RunConfig
        from ttcd_jax.sharding.mesh import build_mesh
        from ttcd_jax.train.flops import training_flops_per_token

        config = load_config(RunConfig, gin, params, config_dir=cli.CONFIG_DIR)
        mesh = build_mesh(config.mesh)
        place, batch = build.placement(config, mesh), build.abstract_batch(config, mesh)
        with jax.set_mesh(mesh):
            lowered = build.build_step(config, mesh).lower(
                build.abstract_state(config, mesh), batch
            )
        compiled = lowered.compile()
        self.gin = gin
        self.tokens = config.batch_size * config.data.seq_len
        self.flops_per_token = training_flops_per_token(config.model, config.data.seq_len)
        self.bytes = measure.needed_bytes(compiled)
        self.state = build.fresh_state(config, mesh)
        self._step, self._batch = compiled, place(_batch(batch, config.model.vocab_size))

    def take(self):
        """One step; what to wait for."""
        self.state, metrics = self._step(self.state, self._batch)
        return metrics


def _batch(shapes, vocab_size: int):
    """Random tokens, every one a target, one document per row."""
    import numpy as np

    B, T = shapes["tokens"].shape
    tokens = np.random.default_rng(0).integers(0, vocab_size, (B, T + 1))
    fields = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.zeros((B, T)),
        "positions": np.broadcast_to(np.arange(T), (B, T)),
        "loss_mask": np.ones((B, T)),
    }
    return {name: x.astype(shapes[name].dtype) for name, x in fields.items()}


def _row(run: _Run, seconds: dict[str, float], first: _Run) -> StepRow:
    import jax

    from ttcd_jax.train.flops import peak_flops

    rate, base_rate = (each.tokens / seconds[each.gin] for each in (run, first))
    peak = peak_flops(jax.devices()[0].device_kind)
    return StepRow(
        gin=run.gin,
        tokens=run.tokens,
        seconds=seconds[run.gin],
        tokens_per_second=rate,
        mfu=peak and rate * run.flops_per_token / (peak * jax.device_count()),
        step_bytes=run.bytes,
        time_ratio=base_rate / rate,
        flops_ratio=run.flops_per_token / first.flops_per_token,
        **_saving(run),
    )


def _saving(run: _Run) -> dict[str, float | None]:
    """Median seconds until a checkpoint is handed over, and of a step while one is written."""
    import jax

    from ttcd_jax.train.checkpoint import Checkpoints

    handed_over, steps = [], []
    with (
        tempfile.TemporaryDirectory(dir=FLAGS.save_dir) as folder,
        contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints,
        ThreadPoolExecutor(1) as pool,
    ):
        for number in range(FLAGS.saves):
            jax.block_until_ready(run.state)
            save = functools.partial(checkpoints.save, number, dict(run.state))
            handed_over.append(_seconds(save))
            written = pool.submit(checkpoints.wait)
            while not written.done():
                steps.append(_seconds(run.take))
            written.result()
    return {
        "seconds_to_hand_over": statistics.median(handed_over) if handed_over else None,
        "seconds_while_saving": statistics.median(steps) if steps else None,
    }


def _seconds(call: Callable[[], Any]) -> float:
    import jax

    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _table(rows: list[StepRow]) -> str:
    from ttcd_kernels import measure

    header = "gin", "tokens", "step ms", "tokens/s", "MFU %", "MiB", "time", "FLOPs"
    cells = [
        (
            row.gin,
            f"{row.tokens:,}",
            measure.milliseconds(row.seconds),
            f"{row.tokens_per_second:,.0f}",
            measure.percent(row.mfu),
            measure.mebibytes(row.step_bytes),
            measure.ratio(row.time_ratio),
            measure.ratio(row.flops_ratio),
            measure.milliseconds(row.seconds_to_hand_over),
            measure.milliseconds(row.seconds_while_saving),
        )
        for row in rows
    ]
    return measure.table((*header, "save ms", "step ms, saving"), cells)


if __name__ == "__main__":
    cli.run(main)
