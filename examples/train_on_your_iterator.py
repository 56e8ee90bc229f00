"""A run on your own batches, without a corpus or a .gin file. The same call resumes it.

python examples/train_on_your_iterator.py runs/counting
"""

import itertools
import sys
from collections.abc import Iterator

import numpy as np

from ttcd_jax import BatchesConfig, OptimizerConfig, RunConfig, TransformerConfig, train_run

CONFIG = RunConfig(
    model=TransformerConfig(
        vocab_size=32, dim=32, num_layers=2, num_heads=2, mlp_dim=64, method="swa", window=16
    ),
    data=BatchesConfig(seq_len=24),
    optimizer=OptimizerConfig(),
    steps=30,
    batch_size=8,
)


def batches(first_step: int) -> Iterator[np.ndarray]:
    """Batches [8, 25] from `first_step` on: rows that count upwards from a random start."""
    for step in itertools.count(first_step):
        start = np.random.default_rng(step).integers(0, 32, (8, 1))
        yield (start + np.arange(25)) % 32


if __name__ == "__main__":
    train_run(CONFIG, sys.argv[1], batches)
