"""Measures what training a sweep's runs as one program gains over one run after another.

    python -m experiments.bench.mad [--task=in-context-recall --method=ipttcd --runs=6 --steps=20]

Three programs take the same steps of the same runs, compiled and warm: all runs at once, on as many
devices as divide their number (a CPU's are its cores); one run after another, an epoch per call;
one run after another, a step per call, as a training loop does it. Compile seconds are told apart:
they come once per program, so once per run where every run is a process of its own. --quick shrinks
everything to seconds.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from ttcd_jax.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string("task", "in-context-recall", "The task; its published baseline sizes.")
flags.DEFINE_string("method", "ipttcd", "The method.")
flags.DEFINE_integer("runs", 6, "Runs of the sweep.", lower_bound=1)
flags.DEFINE_integer("steps", 20, "Steps per measurement.", lower_bound=1)
flags.DEFINE_integer("batch_size", 128, "Rows per step.", lower_bound=1)
flags.DEFINE_integer("dim", 128, "Width of the model; its MLP is twice as wide.", lower_bound=8)
flags.DEFINE_integer("rounds", 3, "Timed rounds; the programs take turns.", lower_bound=1)
flags.DEFINE_string("compute", "float32", "Dtype of matrix products, e.g. bfloat16.")
flags.DEFINE_bool("quick", False, "Tiny sizes, whatever the other flags say.")
flags.DEFINE_string("json", None, "File for the report.")

_QUICK = {"task": "compression", "runs": 2, "steps": 2, "batch_size": 4, "dim": 16, "rounds": 1}


def main(argv: list[str]) -> None:
    from ttcd_kernels import measure

    sizes = {name: getattr(FLAGS, name) for name in _QUICK} | {"method": FLAGS.method}
    cli.use_every_core()
    sizes |= {"compute": FLAGS.compute} | (_QUICK if FLAGS.quick else {})
    _check(sizes)
    programs, compile_seconds = _programs(sizes)
    seconds = measure.median_seconds(programs, sizes["rounds"])
    work = sizes["runs"] * sizes["steps"]
    together = seconds["all runs at once"]
    rows = [
        {
            "program": name,
            "ms": round(1e3 * seconds[name], 1),
            "run-steps per s": round(work / seconds[name], 2),
            "compile s": round(compile_seconds[name], 1),
            "times slower": round(seconds[name] / together, 2),
        }
        for name in programs
    ]
    environment = measure.environment()
    print(" ".join(f"{key}={value}" for key, value in (environment | sizes).items()))
    print(measure.table(tuple(rows[0]), [tuple(map(str, row.values())) for row in rows]))
    if FLAGS.json:
        report = {"environment": environment, "sizes": sizes, "rows": rows}
        Path(FLAGS.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _check(sizes: dict[str, Any]) -> None:
    from experiments.mad.models import MAD_METHODS
    from experiments.mad.tasks.settings import TASKS

    for name, known in (("task", TASKS), ("method", MAD_METHODS)):
        if sizes[name] not in known:
            raise UserError(f"--{name}={sizes[name]} is not one of {', '.join(known)}")
    if FLAGS.json and not Path(FLAGS.json).parent.is_dir():
        raise UserError(f"--json: no folder {Path(FLAGS.json).parent}; create it first")


def _programs(sizes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Program -> what runs it once; program -> seconds its first call took beyond the second."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from experiments.mad import sweep
    from experiments.mad.models import mad_config
    from experiments.mad.problem import WINDOWS, mad_problem
    from experiments.mad.tasks.config import BASELINES
    from experiments.mad.tasks.instances import instances
    from ttcd_jax.precision import Precision

    task, steps, batch = BASELINES[sizes["task"]], sizes["steps"], sizes["batch_size"]
    rows = instances(task, seed=0, num_train=steps * batch, num_test=0).train
    model = mad_config(
        sizes["method"],
        vocab_size=task.vocab_size,
        window=WINDOWS[task.task],
        dim=sizes["dim"],
        mlp_dim=2 * sizes["dim"],
        precision=Precision(compute=sizes["compute"]),
    )
    recipe = sweep.RecipeConfig(epochs=steps, batch_size=batch)
    every = jax.tree.map(jax.numpy.asarray, rows)
    first = jax.tree.map(lambda x: x[:batch], every)

    def made(num_runs: int):
        mesh = sweep.sweep_mesh(jax.devices()[: math.gcd(num_runs, jax.device_count())])
        put[num_runs] = jax.device_put((every, first), NamedSharding(mesh, PartitionSpec()))
        made = sweep.programs(recipe, mad_problem(task, model), steps, mesh)
        rates = np.full(num_runs, 1e-3, np.float32)
        hyper = sweep.Hyper(rates, 0.1 * rates, np.arange(num_runs, dtype=np.uint32))
        return lambda: made.init(hyper), lambda state, *row: made.train(state, hyper, *row)

    put: dict[int, Any] = {}  # number of runs -> all rows and those of one step, on its devices
    start_all, train_all = made(sizes["runs"])
    start_one, train_one = made(1)

    def at_once():
        return train_all(start_all(), put[sizes["runs"]][0], 0, 1).train["step"]

    def by_epoch():
        return [train_one(start_one(), put[1][0], 0, 1).train["step"] for _ in range(sizes["runs"])]

    def by_step():
        ends = []
        for _ in range(sizes["runs"]):
            state = start_one()
            for step in range(steps):
                state = train_one(state, put[1][1], step, step + 1)
            ends.append(state.train["step"])
        return ends

    programs = {
        "all runs at once": at_once,
        "one after another, epoch by epoch": by_epoch,
        "one after another, step by step": by_step,
    }
    return programs, {name: _compile_seconds(program) for name, program in programs.items()}


def _compile_seconds(program) -> float:
    import jax

    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(program())
        seconds.append(time.perf_counter() - start)
    return max(seconds[0] - seconds[1], 0.0)


if __name__ == "__main__":
    cli.run(main)
