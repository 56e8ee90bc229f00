"""The flag --distributed of commands that run as one job of several processes."""

import math
import os

from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "distributed",
    "none",
    "How several processes find each other: none, slurm, jobset, or "
    "HOST:PORT,NUM_PROCESSES,PROCESS_ID, where {NAME} is a variable of the environment.",
)


def connect(lost_seconds: float = 60.0) -> None:
    """Joins the other processes of the job, if any. One that is not heard of for twice
    `lost_seconds` is lost, also before the first step. Call it before JAX's first array."""
    import jax

    from ttcd_jax.sharding.distributed import detect, initialize
    from ttcd_jax.train.watchdog import Watchdog

    processes = detect(FLAGS.distributed, os.environ)
    if processes is not None:
        with Watchdog(processes.count):
            initialize(processes, heartbeat_seconds=math.ceil(2 * lost_seconds))
            jax.devices()  # waits until each process knows those of the others
