"""A sweep's runs trained as one program and one after another: the same steps."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ttcd_kernels import measure

from experiments.bench.frame import MILLISECOND, Case, Row
from experiments.mad import sweep
from experiments.mad.models import WINDOWS, MADMethod, mad_config, mad_problem
from experiments.mad.tasks.instances import instances
from experiments.mad.tasks.settings import BASELINES
from ttcd_jax.config import Config, Positive
from ttcd_jax.errors import UserError
from ttcd_jax.precision import FloatName, Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Config):
    """The published baseline sizes of `task`; the MLP is twice as wide as `dim`."""

    task: str = "in-context-recall"
    method: MADMethod = "ipttcd"
    runs: Positive = 6
    steps: Positive = 20
    batch_size: Positive = 128
    dim: Positive = 128
    compute: FloatName = "float32"
    rounds: Positive = 3

    def validate(self) -> None:
        if self.task not in BASELINES:
            raise UserError(f"--task={self.task} is not one of {', '.join(BASELINES)}")


def measured(options: Sweep) -> Iterator[list[Row]]:
    """A row per program: all runs at once, on as many devices as divide their number (a CPU's are
    its cores); one run after another, an epoch per call; the same, a step per call, as a training
    loop does it."""
    task, steps, batch = BASELINES[options.task], options.steps, options.batch_size
    config = mad_config(
        options.method,
        vocab_size=task.vocab_size,
        window=WINDOWS[task.task],
        dim=options.dim,
        mlp_dim=2 * options.dim,
        precision=Precision(compute=options.compute),
    )
    recipe, problem = sweep.RecipeConfig(epochs=steps, batch_size=batch), mad_problem(task, config)
    epoch = instances(task, seed=0, num_train=steps * batch, num_test=0).train
    first = jax.tree.map(lambda x: x[:batch], epoch)

    def made(num_runs: int) -> tuple[Callable[[], Any], Callable[..., Any], Any, Any]:
        """(start, train, the rows of an epoch, those of a step) of so many runs."""
        mesh = sweep.sweep_mesh(jax.devices()[: math.gcd(num_runs, jax.device_count())])
        placed = jax.device_put((epoch, first), NamedSharding(mesh, PartitionSpec()))
        runs = sweep.programs(recipe, problem, steps, mesh)
        rates = np.full(num_runs, 1e-3, np.float32)
        hyper = sweep.Hyper(rates, 0.1 * rates, np.arange(num_runs, dtype=np.uint32))
        start = functools.partial(runs.init, hyper)
        return start, lambda state, *rest: runs.train(state, hyper, *rest), *placed

    start_all, train_all, rows_of_all, _ = made(options.runs)
    start, train, rows, rows_of_step = made(1)

    def by_step() -> Any:
        state = start()
        for step in range(steps):
            state = train(state, rows_of_step, step, step + 1)
        return state.loss

    each = range(options.runs)
    programs = {
        "all runs at once": lambda: train_all(start_all(), rows_of_all, 0, 1).loss,
        "one after another, an epoch per call": lambda: [
            train(start(), rows, 0, 1).loss for _ in each
        ],
        "one after another, a step per call": lambda: [by_step() for _ in each],
    }
    seconds = measure.median_seconds(programs, options.rounds)
    together, work = seconds["all runs at once"], options.runs * steps
    yield [
        {"program": name, "ms": time / MILLISECOND, "run-steps/s": work / time}
        | {"times slower": time / together}
        for name, time in seconds.items()
    ]


_QUICK: Row = {"task": "compression", "method": "swa", "runs": 2, "steps": 2, "batch_size": 4}
CASES = {"mad": Case(Sweep, _QUICK | {"dim": 16, "rounds": 1}, measured)}
