"""A run that starts from the parameters of another run and adds a memory.

    python examples/continue_from_checkpoint.py runs/counting runs/grown

The added parameters are initialised so that the first logits equal the other run's bit for bit.
"""

import sys

from train_on_your_iterator import batches

from ttcd_jax import MemoryConfig, RunConfig, train_run
from ttcd_jax.run.directory import RunDirectory
from ttcd_jax.run.start import starting_model


def grown(run_dir: str) -> RunConfig:
    """The configuration of the run in `run_dir`, with a memory added to its first layer and
    float32 parameters, in which small steps move them."""
    config = RunConfig.from_dict(RunDirectory(run_dir).read_config())
    memory = MemoryConfig(chunk_size=8, output="teacher_raw", normalizes_keys=False)
    memory = memory.replace(teacher_conv_init="identity", student_conv_init="zeros")
    changes = {"method": "ipttcd", "student_window": 8, "fast_layers": (0,), "memory": memory}
    return config.replace(model=starting_model(run_dir).replace(**changes), start_from=run_dir)


if __name__ == "__main__":
    source, run_dir = sys.argv[1:]
    train_run(grown(source), run_dir, batches)
