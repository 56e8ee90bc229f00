"""A sweep's runs trained as one program and one after another: the same steps."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np
from ttcd_kernels import measure
from ttcd_kernels.measure import MILLISECOND, Row

from experiments.studies.bench.case import Case
from experiments.studies.mad.models import MADMethod, mad_config, mad_problem
from experiments.studies.mad.sweep import Hyper, RecipeConfig, programs, sweep_mesh
from experiments.studies.mad.tasks import BASELINES, TaskName, instances
from ttcd_jax.config import Positive
from ttcd_jax.precision import FloatName, Precision
from ttcd_jax.sharding.batch import replicated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Case):
    """The published baseline sizes of `task`; the MLP is twice as wide as `dim`. A row per program:
    all runs at once, on as many devices as divide their number (a CPU's are its cores); one after
    another, an epoch per call; the same, a step per call, as a training loop does it."""

    task: TaskName = "in-context-recall"
    method: MADMethod = "ipttcd"
    runs: Positive = 6
    steps: Positive = 20
    batch_size: Positive = 128
    dim: Positive = 128
    compute: FloatName = "float32"
    rounds: Positive = 3

    quick: ClassVar[Row] = {"task": "compression", "method": "swa", "dim": 16, "rounds": 1}
    quick |= {"runs": 2, "steps": 2, "batch_size": 4}

    def tables(self) -> Iterator[list[Row]]:
        calls: dict[str, Callable[[], Any]] = {"all runs at once": self._trainer(self.runs)[0]}
        for unit, one in zip(("an epoch", "a step"), self._trainer(1), strict=True):
            name = f"one after another, {unit} per call"
            calls[name] = lambda one=one: [one() for _ in range(self.runs)]
        seconds, work = measure.median_seconds(calls, self.rounds), self.runs * self.steps
        first = seconds["all runs at once"]
        yield [
            {"program": name, "ms": x / MILLISECOND, "run-steps/s": work / x}
            | {"times slower": x / first}
            for name, x in seconds.items()
        ]

    def _trainer(self, count: int) -> list[Callable[[], jax.Array]]:
        """Train `count` runs, an epoch or a step per call."""
        task, steps, size = BASELINES[self.task], self.steps, self.batch_size
        sizes: Any = {"dim": self.dim, "mlp_dim": 2 * self.dim}
        config = mad_config(self.method, task, precision=Precision(compute=self.compute), **sizes)
        mesh = sweep_mesh(jax.devices()[: math.gcd(count, jax.device_count())])
        recipe = RecipeConfig(epochs=steps, batch_size=size)
        init, train, _ = programs(recipe, mad_problem(task, config), mesh)
        rates = np.full(count, 1e-3, np.float32)
        hyper = Hyper(rates, 0.1 * rates, np.arange(count, dtype=np.uint32))
        epoch = instances(task, seed=0, num_train=steps * size, num_test=0).train
        first = jax.tree.map(lambda x: x[:size], epoch)

        def run(rows: tuple, num_calls: int) -> jax.Array:
            state = init(hyper)
            for i in range(num_calls):
                state = train(state, hyper, rows, i, i + 1)
            return state.loss

        pairs = zip(jax.device_put((epoch, first), replicated(mesh)), (1, steps), strict=True)
        return [functools.partial(run, *pair) for pair in pairs]
