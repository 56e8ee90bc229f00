"""A run with bad steps in its data: a batch with the token NAN makes the loss NaN, one with SPIKE
multiplies it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import config_of, run_config

from ttcd_jax import BatchesConfig, Precision, train_run
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.run.training import TrainedRun
from ttcd_jax.train import bad_steps
from ttcd_jax.train import step as step_module
from ttcd_jax.train.loss import summed_loss

NAN, SPIKE = 9, 10
WARMUP = 14
BAD = {3: NAN, 16: SPIKE, 17: NAN, 20: SPIKE}  # by step
CONFIG = run_config(
    config_of("ipttcd", num_layers=1, precision=Precision()),
    **{"data": BatchesConfig(seq_len=8), "steps": 24, "batch_size": 4, "log_every": 1},
    **{"checkpoint_every": 6, "max_skipped_steps": 4, "spike_factor": 20.0},
)


def poisoned_loss(hidden: Any, head: Any, targets: Any, *rest: Any) -> Any:
    loss = summed_loss(hidden, head, jnp.minimum(targets, 8), *rest)
    factor = jnp.where((targets == SPIKE).any(), 1e3, 1.0)
    return loss * jnp.where((targets == NAN).any(), jnp.nan, factor)


def batches(start: int) -> Iterator[np.ndarray]:
    for step in range(start, CONFIG.steps):
        batch = np.random.default_rng(step).integers(0, 8, (CONFIG.batch_size, 9))
        batch[2, 4] = BAD.get(step + 1, 0)
        yield batch


def train(run_dir: Path, *on_metrics: Any, trackers: Any = (), **changes: Any) -> TrainedRun:
    calls = {"on_metrics": on_metrics, "trackers": trackers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "summed_loss", poisoned_loss)
        patch.setattr(bad_steps, "WARMUP", WARMUP)
        return train_run(CONFIG.replace(**changes), run_dir, batches, **calls)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The records without what the time changes."""
    timed = ("tokens_per_second", "data_wait")
    every = read_metrics(run_dir / "metrics.jsonl")
    return [{name: x for name, x in record.items() if name not in timed} for record in every]
