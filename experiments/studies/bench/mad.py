"""A sweep's runs trained as one program and one after another: the same steps."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from ttcd_kernels import measure
from ttcd_kernels.measure import MILLISECOND, Row

from experiments.studies.bench.frame import Case
from experiments.studies.mad.models import MADMethod, mad_config, mad_problem
from experiments.studies.mad.sweep import Hyper, RecipeConfig, programs, sweep_mesh
from experiments.studies.mad.tasks import BASELINES, TaskName, instances
from ttcd_jax.config import Config, Positive
from ttcd_jax.precision import FloatName, Precision
from ttcd_jax.sharding.batch import replicated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Config):
    """The published baseline sizes of `task`; the MLP is twice as wide as `dim`."""

    task: TaskName = "in-context-recall"
    method: MADMethod = "ipttcd"
    runs: Positive = 6
    steps: Positive = 20
    batch_size: Positive = 128
    dim: Positive = 128
    compute: FloatName = "float32"
    rounds: Positive = 3


def measured(options: Sweep) -> Iterator[list[Row]]:
    """A row per program: all runs at once, on as many devices as divide their number (a CPU's are
    its cores); one run after another, an epoch per call; the same, a step per call, as a training
    loop does it."""
    task, steps, batch = BASELINES[options.task], options.steps, options.batch_size
    dims: dict[str, Any] = {"dim": options.dim, "mlp_dim": 2 * options.dim}
    config = mad_config(options.method, task, precision=Precision(compute=options.compute), **dims)
    recipe, problem = RecipeConfig(epochs=steps, batch_size=batch), mad_problem(task, config)
    epoch = instances(task, seed=0, num_train=steps * batch, num_test=0).train
    first = jax.tree.map(lambda x: x[:batch], epoch)

    def trainer(num_runs: int) -> Callable[..., jax.Array]:
        """The function that trains `num_runs` runs."""
        mesh = sweep_mesh(jax.devices()[: math.gcd(num_runs, jax.device_count())])
        init, train, _ = programs(recipe, problem, mesh)
        rates = np.full(num_runs, 1e-3, np.float32)
        hyper = Hyper(rates, 0.1 * rates, np.arange(num_runs, dtype=np.uint32))
        rows, rows_of_step = jax.device_put((epoch, first), replicated(mesh))

        def run(*, by_step: bool = False) -> jax.Array:
            state = init(hyper)
            if not by_step:
                return train(state, hyper, rows, 0, 1).loss
            for step in range(steps):
                state = train(state, hyper, rows_of_step, step, step + 1)
            return state.loss

        return run

    all_runs, one_run, each = trainer(options.runs), trainer(1), range(options.runs)
    calls = {
        "all runs at once": all_runs,
        "one after another, an epoch per call": lambda: [one_run() for _ in each],
        "one after another, a step per call": lambda: [one_run(by_step=True) for _ in each],
    }
    seconds = measure.median_seconds(calls, options.rounds)
    together, work = seconds["all runs at once"], options.runs * steps
    yield [
        {"program": name, "ms": time / MILLISECOND, "run-steps/s": work / time}
        | {"times slower": time / together}
        for name, time in seconds.items()
    ]


_QUICK: Row = {"task": "compression", "method": "swa", "runs": 2, "steps": 2, "batch_size": 4}
CASES = {"mad": Case(Sweep, _QUICK | {"dim": 16, "rounds": 1}, measured)}
