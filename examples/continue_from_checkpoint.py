"""A run that starts from another one's parameters, with a memory that the other one lacks.

    python examples/continue_from_checkpoint.py runs/counting runs/grown

The new parameters start such that the first logits are those of the other run, to the last bit.
"""

import sys

from train_on_your_iterator import batches

from ttcd_jax import MemoryConfig, RunConfig, train_run
from ttcd_jax.run.directory import RunDirectory


def grown(run_dir: str) -> RunConfig:
    """The configuration of the run in `run_dir`, its first layer with a memory."""
    config = RunConfig.from_dict(RunDirectory(run_dir).read_config())
    memory = MemoryConfig(
        chunk_size=8,
        output="teacher_raw",
        normalizes_keys=False,
        teacher_conv_init="identity",
        student_conv_init="zeros",
    )
    changes = {"method": "ipttcd", "student_window": 8, "fast_layers": (0,), "memory": memory}
    return config.replace(model=config.model.replace(**changes), start_from=run_dir)


if __name__ == "__main__":
    source, run_dir = sys.argv[1:]
    train_run(grown(source), run_dir, batches)
