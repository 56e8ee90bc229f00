"""The flag --distributed of commands that run as one job of several processes."""

import os

from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "distributed",
    "none",
    "How several processes find each other: none, auto, slurm, openmpi, jobset, or "
    "HOST:PORT,NUM_PROCESSES,PROCESS_ID.",
)


def connect() -> None:
    """Joins the other processes of the job, if any. Call it before JAX's first array."""
    from ttcd_jax.sharding.distributed import detect, initialize

    processes = detect(FLAGS.distributed, os.environ)
    if processes is not None:
        initialize(processes)
